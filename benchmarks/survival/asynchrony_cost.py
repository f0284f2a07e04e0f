"""What it costs that a run learns the same whatever its clocks say: chunks that stream wait for each other by count and
go through a model as they were sent, where they could be sent at once and a reader take together all that has come.

Everything else that a run decides by, it would decide by without that wish too: a bound on the staleness has generation
wait for weights and training for sequences, in the same turns.
"""

from __future__ import annotations

import queue
import shutil
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.survival.job import Case, request_of, write_models
from benchmarks.survival.kills import APART
from meshwright.profiles.stages import GENERATE
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.run import RankRun
from meshwright.runtime.launch.launch import ProcessSetup, launch
from meshwright.runtime.messages.streaming import ChunkMessage, ChunkReader, ChunkSender, TokenChunk

_STREAMED = ("reward_score", "ref_logprob", "critic_value")
_READ = {"chunk_tokens": 4, "micro_batch_size": 8}
_PINS = tuple(pin for pin in APART if "reward_score" not in pin)
CASE = Case(
    name="streamed",
    num_ranks=2,
    pins=(*_PINS, "reward_score.pool=1:1"),
    schedules={GENERATE: {"generation_slots": 4}, **dict.fromkeys(_STREAMED, _READ)},
    longest_response=64,
)
"""Slots are filled again as responses end, so that chunks are whole at different times, and few are sent together."""
STEPS, REPEATS = 10, 4
MOST_MORE = 0.1
"""Of a step."""
_WARM_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class SamenessCost:
    """Medians of the seconds of a step: with chunks as they were sent, and with all that has come together."""

    as_sent: float
    as_come: float

    @property
    def more(self) -> float:
        """Of a step, as a fraction."""
        return self.as_sent / self.as_come - 1.0

    @property
    def holds(self) -> bool:
        """Whether it is as little as was asked."""
        return self.more < MOST_MORE


def measure(scratch: Path) -> SamenessCost:
    """Runs in turns, `REPEATS` of each."""
    models = scratch / "models of the cost"
    models.mkdir()
    write_models(models)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(REPEATS):
        for as_come in seconds:
            asked = request_of(models, CASE, scratch / "run", STEPS)
            asked.out.mkdir()
            how = {"setup": ProcessSetup("cpu"), "preload": "meshwright.runtime.execution.train"}
            seconds[as_come] += launch(_seconds_of_steps, asked, as_come, num_ranks=2, **how)[1][_WARM_STEPS:]
            shutil.rmtree(asked.out)
    return SamenessCost(as_sent=statistics.median(seconds[False]), as_come=statistics.median(seconds[True]))


def report(found: SamenessCost) -> str:
    """In a sentence."""
    return (
        f"Chunks as they were sent: {found.as_sent:.3f} s a step; all that has come together: {found.as_come:.3f} s: "
        f"{found.more:+.1%} (of {MOST_MORE:.0%})."
    )


def _seconds_of_steps(asked: RunRequest, as_come: bool) -> list[float]:
    if as_come:
        ChunkReader._arriving = _together  # type: ignore[method-assign]
        send = ChunkSender.send
        ChunkSender.send = lambda self, chunks, _=0: send(self, chunks)  # type: ignore[method-assign]
    run, seconds = RankRun(asked), []
    run.recorder.open(0)
    for turn in run.periods:
        began = time.perf_counter()
        run.run_period(turn)
        seconds.append(time.perf_counter() - began)
    run.finish()
    run.close()
    return seconds


def _together(self: ChunkReader) -> Iterator[ChunkMessage]:
    """The next chunk of every sequence of which one has come, and what was delivered at last."""
    arrived: queue.SimpleQueue[ChunkMessage | BaseException] = queue.SimpleQueue()
    for owner in self._owners:
        threading.Thread(target=self._listen, args=(owner, arrived), daemon=True).start()
    num_open, delivered = len(self._owners), dict[int, int]()
    waiting: dict[int, deque[TokenChunk]] = {}
    while num_open or waiting:
        while num_open and not (arrived.empty() and waiting):
            message = arrived.get()
            assert isinstance(message, ChunkMessage), message
            for chunk in message.chunks:
                waiting.setdefault(chunk.sequence, deque()).append(chunk)
            if message.delivered is not None:
                num_open, delivered = num_open - 1, delivered | dict(message.delivered)
        if waiting:
            yield ChunkMessage(tuple(chunks.popleft() for chunks in waiting.values()))
            waiting = {sequence: chunks for sequence, chunks in waiting.items() if chunks}
    yield ChunkMessage(delivered=delivered)
