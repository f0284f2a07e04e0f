"""The tool's workers on one rank: threads that each have a call under way in a process of its own."""

from __future__ import annotations

import queue
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from meshwright.planner.environment.tool import Tool
from meshwright.runtime.environment.samples import RewardError, ToolCall, reason_of, say
from meshwright.runtime.environment.worker import Worker

_MOST_CHARACTERS = 2**20
"""Of an answer."""


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
            return _text(worker.answers([call])[0])
        except Exception as error:
            told = f"tool {self._tool.function} in turn {call.turn} of sample {call.id}: {reason_of(error)}"
            if self._tool.failure_answer is None:
                raise RewardError(told) from None
            say(f"{told}; it is answered {self._tool.failure_answer!r}")
            return self._tool.failure_answer
        finally:
            self._idle.put(worker)


def _text(answer: object) -> str:
    """Raises RewardError for what no tokenizer takes, or takes long for."""
    text = str(answer)
    if len(text) > _MOST_CHARACTERS:
        raise RewardError(f"its answer has {len(text)} characters, more than {_MOST_CHARACTERS}")
    if any("\ud800" <= each <= "\udfff" for each in text):
        raise RewardError("its answer has a lone surrogate, which is no character")
    return text
