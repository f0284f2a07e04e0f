"""How long calls of a reward that fail for now are made again: one account for all its workers and queued samples.

The account counts the seconds in which any call was failing, each second once however many calls failed in it. A call
is made again until `retry_seconds` of them have passed since its samples were handed over, or since anything was
answered, whichever was first; after that it is made once. So a judge that is away is given up by all workers together,
what is queued behind the samples that met it first does not wait for it anew, and one answer takes it on again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from meshwright.runtime.environment.samples import FailedForNowError, JudgeAwayError

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0

_Answer = TypeVar("_Answer")


class Retries:
    """Of one reward on one rank."""

    def __init__(self, retry_seconds: float, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._seconds, self._sleep = retry_seconds, sleep
        self._lock = threading.Lock()
        self._counted, self._num_failing, self._since = 0.0, 0, 0.0
        """Seconds in which calls were failing, without those from `_since` on while some are."""
        self._counted_until = self._answered = 0.0
        """When calls last ceased to fail, and when one was last answered."""
        self._spent_then = 0.0
        """What was spent when a call was last answered."""

    def spent(self) -> float:
        """Seconds in which calls were failing, up to now."""
        with self._lock:
            return self._spent()

    def _spent(self) -> float:
        return self._counted + (time.monotonic() - self._since if self._num_failing else 0.0)

    def answer(self, call: Callable[[], _Answer], before: float) -> _Answer:
        """What the call answers; it is made again while it raises FailedForNowError and there is time.

        `before` is what was spent when the first of its samples was handed over. Raises the last error, or in its place
        JudgeAwayError where it was that nobody answers, and nobody has answered any other call since this one began.
        """
        begun, pause = time.monotonic(), _FIRST_PAUSE_SECONDS
        try:
            return self._tried(call)
        except FailedForNowError as error:
            last = error
        with self._failing(begun):
            while self.spent() - min(before, self._spent_then) + pause <= self._seconds:
                self._sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                try:
                    return self._tried(call)
                except FailedForNowError as error:
                    last = error
        told = f"{last} (tried for {time.monotonic() - begun:.1f} s)"
        if last.is_away and self._answered < begun:
            raise JudgeAwayError(told)
        raise FailedForNowError(told)

    def _tried(self, call: Callable[[], _Answer]) -> _Answer:
        found = call()
        with self._lock:
            self._answered, self._spent_then = time.monotonic(), self._spent()
        return found

    @contextmanager
    def _failing(self, begun: float) -> Iterator[None]:
        """Within it a call is failing, and has been since it was begun."""
        with self._lock:
            begun = max(begun, self._counted_until)
            self._since = min(self._since, begun) if self._num_failing else begun
            self._num_failing += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_failing -= 1
                if not self._num_failing:
                    self._counted_until = time.monotonic()
                    self._counted += self._counted_until - self._since
