"""A retry budget that all workers and queued samples of a reward share.

The budget counts the seconds in which at least one call was failing, each second once however many calls failed in it.
A call is retried until `retry_seconds` of them have passed since its samples were submitted or since the last answer,
whichever came first; after that it is tried once. So all workers give up an unreachable judge together, samples queued
behind the first failing ones do not wait for it again, and one answer renews the budget.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from meshwright.runtime.environment.samples import JudgeUnreachableError, TemporaryRewardError

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0

_Answer = TypeVar("_Answer")


class RetryBudget:
    """The retry budget of one reward on one rank."""

    def __init__(self, retry_seconds: float, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._seconds, self._sleep = retry_seconds, sleep
        self._lock = threading.Lock()
        self._counted, self._num_failing, self._failing_since = 0.0, 0, 0.0
        """Seconds in which calls were failing, without those since `_failing_since` while `_num_failing` is not 0."""
        self._failing_until = self._answered_at = 0.0
        """Times at which the last failing call ended, and at which a call was last answered."""
        self._spent_at_answer = 0.0
        """Seconds spent when a call was last answered."""

    def spent_seconds(self) -> float:
        """Seconds in which at least one call was failing, up to now."""
        with self._lock:
            return self._spent()

    def _spent(self) -> float:
        return self._counted + (time.monotonic() - self._failing_since if self._num_failing else 0.0)

    def call_with_retries(self, call: Callable[[], _Answer], spent_before: float) -> _Answer:
        """Return the result of the call, which is retried while it raises FailedForNowError and there is budget left.

        `before` is what `spent` returned when the first of its samples was submitted. Raises FailedForNowError with the
        last reason, or JudgeAwayError if the server was unreachable and no call was answered since this one began.
        """
        call_start, pause = time.monotonic(), _FIRST_PAUSE_SECONDS
        try:
            return self._call_once(call)
        except TemporaryRewardError as error:
            last_error = error
        with self._failing(call_start):
            while self.spent_seconds() - min(spent_before, self._spent_at_answer) + pause <= self._seconds:
                self._sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                try:
                    return self._call_once(call)
                except TemporaryRewardError as error:
                    last_error = error
        message = f"{last_error} (tried for {time.monotonic() - call_start:.1f} s)"
        if last_error.is_unreachable and self._answered_at < call_start:
            raise JudgeUnreachableError(message)
        raise TemporaryRewardError(message)

    def _call_once(self, call: Callable[[], _Answer]) -> _Answer:
        result = call()
        with self._lock:
            self._answered_at, self._spent_at_answer = time.monotonic(), self._spent()
        return result

    @contextmanager
    def _failing(self, call_start: float) -> Iterator[None]:
        """Count the seconds from the start of a failing call to the end of the block."""
        with self._lock:
            call_start = max(call_start, self._failing_until)
            self._failing_since = min(self._failing_since, call_start) if self._num_failing else call_start
            self._num_failing += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_failing -= 1
                if not self._num_failing:
                    self._failing_until = time.monotonic()
                    self._counted += self._failing_until - self._failing_since
