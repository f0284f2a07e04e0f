"""The tool's workers on one rank: threads that each have a call under way in a process of its own."""

from __future__ import annotations

import queue
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from meshwright.planner.environment.tool import Tool
from meshwright.runtime.environment.samples import RewardError, ToolCall
from meshwright.runtime.environment.worker import Worker


@dataclass(frozen=True)
class ToolAnswer:
    """What a tool said, and the seconds from the call until it was there."""

    text: str
    seconds: float


class Tools:
    """Answers calls in the order in which they come, as many at a time as there are workers."""

    def __init__(self, tool: Tool) -> None:
        self.call_end = tool.call_end
        self._tool = tool
        self._every = [Worker(tool.function, tool.timeout_seconds, "tool") for _ in range(tool.workers)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._every:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(tool.workers, thread_name_prefix="tool")

    def call(self, call: ToolCall) -> Future[ToolAnswer]:
        """The answer, which raises RewardError where the call failed and the job has no answer for that."""
        begun = time.monotonic()
        return self._threads.submit(lambda: ToolAnswer(self._answer(call), time.monotonic() - begun))

    def close(self) -> None:
        """Ends the workers; what is under way has no answer."""
        for worker in self._every:
            worker.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _answer(self, call: ToolCall) -> str:
        worker = self._idle.get()
        try:
            return str(worker.answers([call])[0])
        except RewardError as error:
            told = f"tool {self._tool.function} in turn {call.turn} of sample {call.id}: {error}"
            if self._tool.failure_answer is None:
                raise RewardError(told) from None
            sys.stderr.write(f"{told}; it is answered {self._tool.failure_answer!r}\n")
            return self._tool.failure_answer
        finally:
            self._idle.put(worker)
