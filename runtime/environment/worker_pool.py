"""The workers of rewards and of the tool on one rank: threads that take samples from one queue and each make one call
at a time.

All workers of a reward share a retry budget. It counts the seconds in which at least one call was failing, each second
once however many calls failed in it. A call is retried until `retry_seconds` of them have passed since its samples
were submitted or since the last answer, whichever came first; after that it is tried once. So all workers give up on
an unreachable judge together, samples queued behind the first failing ones do not wait for it again, and one answer
renews the budget.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from meshwright.planner.job.rewards_and_tools import Tool
from meshwright.runtime.environment.samples import (
    JudgeUnreachableError,
    RewardError,
    RewardSample,
    TemporaryRewardError,
    ToolCall,
    print_to_stderr,
    printable_reason,
    validate_scores,
)
from meshwright.runtime.environment.worker import Worker

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0

_Answer = TypeVar("_Answer")


class RetryBudget:
    """The retry budget of one reward on one rank."""

    def __init__(self, retry_seconds: float, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._seconds, self._sleep = retry_seconds, sleep
        self._lock = threading.Lock()
        self._counted, self._num_failing, self._failing_since = 0.0, 0, 0.0
        """`_counted` are seconds in which calls were failing, up to `_failing_since` while `_num_failing` is not 0."""
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
        """Return the result of the call, which is retried while it raises TemporaryRewardError and there is budget
        left.

        `spent_before` is what `spent_seconds` returned when the first of its samples was submitted. Raises
        TemporaryRewardError with the last reason, or JudgeUnreachableError if the server was unreachable and no call
        was answered since this one began."""
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
    """Seconds of failing calls, by the reward's `RetryBudget`, when the sample was submitted."""
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

        Calls with temporary failures are retried for at most `retry_seconds` per sample, as `RetryBudget` counts them.
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


_MAX_CHARACTERS = 2**20
"""Length limit of an answer."""


@dataclass(frozen=True)
class ToolAnswer:
    """The answer of a tool, and the seconds from the call until it was known."""

    text: str
    seconds: float


class ToolWorkers:
    """Answers calls in the order of submission, one call per worker at a time."""

    def __init__(self, tool: Tool) -> None:
        self.call_end = tool.call_end
        self._tool = tool
        self._workers = [Worker(tool.function, tool.timeout_seconds, "tool") for _ in range(tool.workers)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(tool.workers, thread_name_prefix="tool")

    def call(self, call: ToolCall) -> Future[ToolAnswer]:
        """Submit a call and return the future of its answer.

        The future raises RewardError if the call failed and the job has no failure_answer.
        """
        start = time.monotonic()
        return self._threads.submit(lambda: ToolAnswer(self._answer(call), time.monotonic() - start))

    def close(self) -> None:
        """End the workers; futures of calls in progress are never completed."""
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _answer(self, call: ToolCall) -> str:
        worker = self._idle.get()
        try:
            return _text(worker.answers([call])[0])
        except Exception as error:
            message = f"tool {self._tool.function} in turn {call.turn} of sample {call.id}: {printable_reason(error)}"
            if self._tool.failure_answer is None:
                raise RewardError(message) from None
            print_to_stderr(f"{message}; it gets the failure_answer {self._tool.failure_answer!r}")
            return self._tool.failure_answer
        finally:
            self._idle.put(worker)


def _text(answer: object) -> str:
    """Return the answer as text. Raises RewardError if it is too long or is not valid Unicode."""
    text = str(answer)
    if len(text) > _MAX_CHARACTERS:
        raise RewardError(f"its answer has {len(text)} characters, more than {_MAX_CHARACTERS}")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise RewardError("its answer has a lone surrogate, which is no character")
    return text
