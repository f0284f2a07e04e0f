"""The workers of one reward on one rank: threads that take samples from one queue and each make one call at a time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from meshwright.runtime.environment.retries import RetryBudget
from meshwright.runtime.environment.samples import (
    JudgeUnreachableError,
    RewardError,
    RewardSample,
    print_to_stderr,
    printable_reason,
    validate_scores,
)


class RewardCaller(Protocol):
    """Scores samples, one call at a time."""

    def score(self, samples: Sequence[RewardSample]) -> list[float]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class RewardAnswer:
    """The score of a sample, and the seconds from the end of its response until it was known."""

    score: float
    seconds: float


@dataclass(frozen=True)
class _Task:
    sample: RewardSample
    submitted: float
    failed_before: float
    """Seconds of failing calls, by the reward's `Retries`, when the sample was submitted."""
    answer: Future[RewardAnswer]


class RewardWorkers:
    """Scores samples in the order of submission, with one call of up to `batch_size` samples per worker at a time."""

    def __init__(
        self,
        name: str,
        build: Callable[[], RewardCaller],
        *,
        num_workers: int,
        batch_size: int = 1,
        failure_score: float | None = None,
        retry_seconds: float = 0.0,
    ) -> None:
        """A sample whose call fails gets the `failure_score`; without one its future raises the RewardError.

        Calls with temporary failures are retried for at most `retry_seconds` per sample, as `Retries` counts them.
        """
        self.name = name
        self._batch_size, self._failure_score = batch_size, failure_score
        self._retries = RetryBudget(retry_seconds)
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._callers = [build() for _ in range(num_workers)]
        for caller in self._callers:
            threading.Thread(target=self._work, args=(caller,), name=f"reward {name}", daemon=True).start()

    def score(self, sample: RewardSample) -> Future[RewardAnswer]:
        """Submit a sample and return the future of its score."""
        task = _Task(sample, time.monotonic(), self._retries.spent_seconds(), Future())
        self._tasks.put(task)
        return task.answer

    def close(self) -> None:
        """End the workers; futures of calls in progress are never completed."""
        for _ in self._callers:
            self._tasks.put(None)
        for caller in self._callers:
            caller.close()

    def _work(self, caller: RewardCaller) -> None:
        while tasks := self._next():
            self._answer(caller, tasks)

    def _next(self) -> list[_Task]:
        """Wait for a task and return it with other queued tasks, up to a batch; return none at the end."""
        tasks: list[_Task] = []
        task = self._tasks.get()
        while task is not None:
            tasks.append(task)
            if len(tasks) == self._batch_size:
                break
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                break
        else:
            if tasks:
                self._tasks.put(None)
        return tasks

    def _answer(self, caller: RewardCaller, tasks: Sequence[_Task]) -> None:
        """Make one call; if it fails for a reason that may lie with one sample, make one call for each sample."""
        samples, failed_before = [task.sample for task in tasks], min(task.failed_before for task in tasks)
        try:
            scores = self._retries.call_with_retries(
                lambda: validate_scores(caller.score(samples), len(samples)), failed_before
            )
        except BaseException as error:  # any error, because the waiting caller has no other signal
            may_be_one_sample = len(tasks) > 1 and not isinstance(error, JudgeUnreachableError)
            for task in tasks:
                if may_be_one_sample:
                    self._answer(caller, [task])
                else:
                    self._fail(task, error)
            return
        for task, score in zip(tasks, scores, strict=True):
            task.answer.set_result(RewardAnswer(score, time.monotonic() - task.submitted))

    def _fail(self, task: _Task, error: BaseException) -> None:
        message = f"reward {self.name} of sample {task.sample.id}: {printable_reason(error)}"
        if self._failure_score is None:
            task.answer.set_exception(RewardError(message))
            return
        print_to_stderr(f"{message}; it gets its failure_score, {self._failure_score:g}")
        task.answer.set_result(RewardAnswer(self._failure_score, time.monotonic() - task.submitted))
