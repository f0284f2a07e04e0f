"""The workers of the tool on one rank: threads that each make one call at a time in a worker process."""

from __future__ import annotations

import queue
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from meshwright.planner.environment.tool import Tool
from meshwright.runtime.environment.samples import RewardError, ToolCall, print_to_stderr, printable_reason
from meshwright.runtime.environment.worker import Worker

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

        The future raises RewardError if the call failed and the job states no failure_answer.
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
