"""The workers of one reward on one rank: threads that take samples from one queue, each with a call under way."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from meshwright.runtime.environment.retries import Retries
from meshwright.runtime.environment.samples import (
    JudgeAwayError,
    RewardError,
    RewardSample,
    checked_scores,
    reason_of,
    say,
)


class Caller(Protocol):
    """What makes one call at a time."""

    def score(self, samples: Sequence[RewardSample]) -> list[float]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class RewardAnswer:
    """A sample's score, and the seconds from when its response had ended until it was there."""

    score: float
    seconds: float


@dataclass(frozen=True)
class _Task:
    sample: RewardSample
    begun: float
    failed_before: float
    """Seconds of failing calls when it was handed over."""
    answer: Future[RewardAnswer]


class Crew:
    """Scores samples in the order in which they come, as many at a time as there are workers and samples of a call."""

    def __init__(
        self,
        name: str,
        build: Callable[[], Caller],
        *,
        num_workers: int,
        batch_size: int = 1,
        failure_score: float | None = None,
        retry_seconds: float = 0.0,
    ) -> None:
        """A sample whose call fails gets the `failure_score`; without one its answer is the RewardError. For no sample
        calls that fail for now are waited for longer than `retry_seconds` in all, as `Retries` counts them."""
        self.name = name
        self._batch_size, self._failure_score = batch_size, failure_score
        self._retries = Retries(retry_seconds)
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._callers = [build() for _ in range(num_workers)]
        for caller in self._callers:
            threading.Thread(target=self._work, args=(caller,), name=f"reward {name}", daemon=True).start()

    def score(self, sample: RewardSample) -> Future[RewardAnswer]:
        """The answer, which may be there already or not."""
        task = _Task(sample, time.monotonic(), self._retries.spent(), Future())
        self._tasks.put(task)
        return task.answer

    def close(self) -> None:
        """Ends the workers; what is under way has no answer."""
        for _ in self._callers:
            self._tasks.put(None)
        for caller in self._callers:
            caller.close()

    def _work(self, caller: Caller) -> None:
        while tasks := self._next():
            self._answer(caller, tasks)

    def _next(self) -> list[_Task]:
        """Waits for a task, and takes others that are there with it; none at the end."""
        found: list[_Task] = []
        task = self._tasks.get()
        while task is not None:
            found.append(task)
            if len(found) == self._batch_size:
                break
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                break
        else:
            if found:
                self._tasks.put(None)
        return found

    def _answer(self, caller: Caller, tasks: Sequence[_Task]) -> None:
        """One call; where it fails for what may be one sample's fault one for each, so that it is known which."""
        samples, before = [task.sample for task in tasks], min(task.failed_before for task in tasks)
        try:
            scores = self._retries.answer(lambda: checked_scores(caller.score(samples), len(samples)), before)
        except BaseException as error:  # whatever it is: who waits for the answer waits for nothing else
            is_of_one = len(tasks) > 1 and not isinstance(error, JudgeAwayError)
            for task in tasks:
                if is_of_one:
                    self._answer(caller, [task])
                else:
                    self._fail(task, error)
            return
        for task, score in zip(tasks, scores, strict=True):
            task.answer.set_result(RewardAnswer(score, time.monotonic() - task.begun))

    def _fail(self, task: _Task, error: BaseException) -> None:
        told = f"reward {self.name} of sample {task.sample.id}: {reason_of(error)}"
        if self._failure_score is None:
            task.answer.set_exception(RewardError(told))
            return
        say(f"{told}; it is paid {self._failure_score:g}")
        task.answer.set_result(RewardAnswer(self._failure_score, time.monotonic() - task.begun))
