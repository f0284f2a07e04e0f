"""A rank that hangs, in every stage, send, refit and collective, and one that is stopped: named rightly, and in time.

A hang is planted where a method or a function is called for the third time on one rank. The run ends with a sentence
when its deadline has passed, which is set to seconds here.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.survival.job import Case, request_of, write_models
from benchmarks.survival.kills import APART
from meshwright.planner.program import durations
from meshwright.profiles.errors import RunFailed
from meshwright.runtime.execution import watchdog
from meshwright.runtime.execution.megatron_device import StageRunner
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.train import _run_locked
from meshwright.runtime.launch.launch import ProcessSetup, launch
from meshwright.runtime.messages.experience import ExperienceTransport
from meshwright.runtime.training.refit import RefitCopy

ALLOWED_SECONDS = 12.0
"""That an instruction may take."""
MOST_SECONDS_MORE = 5.0
"""Beyond them, until the run has ended with the sentence."""
STOPPED = "stopped in "
"""Before the stage in which a process is stopped instead of hanging."""
_BEGAN, _STEPS = "began", 8
_STAGES = tuple(
    f"{role}_{what}"
    for role, what in (
        ("actor", "generate"),
        ("actor", "logprob"),
        ("ref", "logprob"),
        ("reward", "score"),
        ("critic", "value"),
        ("actor", "train"),
        ("critic", "train"),
    )
)
_COLLECTIVES = ("all_reduce", "isend", "irecv", "barrier", "all_gather_object")
_TOGETHER = tuple(f"{stage}.layout=dp2" for stage in _STAGES)


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A hang: on which rank of two, which compute each stage together or apart, and where."""

    where: str
    rank: int
    together: bool = True

    @property
    def case(self) -> Case:
        """The plan that is run."""
        return (
            Case(name="together", num_ranks=2, pins=_TOGETHER)
            if self.together
            else Case(name="apart", num_ranks=2, pins=APART)
        )


PLANTED: Sequence[Planted] = (
    *(Planted(where=stage, rank=place % 2) for place, stage in enumerate(_STAGES)),
    *(
        Planted(where=stage, rank=int(stage not in ("actor_generate", "reward_score")), together=False)
        for stage in _STAGES
    ),
    *(Planted(where="send", rank=rank, together=False) for rank in range(2)),
    *(Planted(where="refit", rank=rank, together=False) for rank in range(2)),
    *(Planted(where=name, rank=1) for name in _COLLECTIVES),
    *(Planted(where=f"{STOPPED}{stage}", rank=place % 2) for place, stage in enumerate(_STAGES)),
    *(
        Planted(where=f"{STOPPED}{stage}", rank=rank, together=False)
        for stage, rank in (("actor_generate", 0), ("critic_train", 1))
    ),
)


@dataclass(frozen=True, kw_only=True)
class Named:
    """What a run with a hang in it ended with, and the seconds from the hang to that; none where it never came."""

    planted: Planted
    sentence: str
    seconds: float | None

    @property
    def is_right(self) -> bool:
        """Whether the rank is named with what it does."""
        rank, where = self.planted.rank, self.planted.where
        if where.startswith(STOPPED):
            return (
                self.sentence.startswith(f"rank {rank} has given no sign of life since")
                and "which is stopped" in self.sentence
            )
        named = self.sentence.startswith(f"rank {rank} has been in ") and "at hang (hangs.py:" in self.sentence
        return named and (where in _COLLECTIVES or self.sentence.startswith(f"rank {rank} has been in {where} "))

    @property
    def holds(self) -> bool:
        """Whether it is named rightly and in time."""
        in_time = self.seconds is not None and self.seconds < ALLOWED_SECONDS + MOST_SECONDS_MORE
        return self.is_right and in_time


def measure(scratch: Path, planted: Sequence[Planted] = PLANTED) -> Iterator[Named]:
    """A run for each."""
    write_models(scratch)
    for number, one in enumerate(planted):
        yield named(scratch, scratch / f"run {number}", one)


def named(scratch: Path, out: Path, planted: Planted) -> Named:
    """What a run of the models of `write_models` ends with in which a rank hangs."""
    asked = request_of(scratch, planted.case, out, _STEPS)
    out.mkdir()
    preparation, preload = ProcessSetup("cpu"), "meshwright.runtime.execution.train"
    sentence = ""
    try:
        launch(_hanging, asked, planted, num_ranks=2, setup=preparation, logs=out, preload=preload)
    except RunFailed as failed:
        sentence = str(failed)
    began = out / _BEGAN
    return Named(
        planted=planted,
        sentence=sentence,
        seconds=time.time() - float(began.read_text()) if began.exists() else None,
    )


def report(found: Sequence[Named]) -> str:
    """As a table of Markdown, and the sentences of those that do not hold."""
    rows = []
    for one in found:
        place = "together" if one.planted.together else "apart"
        late = "-" if one.seconds is None else f"{one.seconds - ALLOWED_SECONDS:.1f}"
        is_right = "yes" if one.is_right else "no"
        rows.append(f"| {one.planted.where} | {place} | {one.planted.rank} | {is_right} | {late} |")
    wrong = [f"- {one.planted.where}, rank {one.planted.rank}: {one.sentence}" for one in found if not one.holds]
    head = "| where it hangs | stages | rank | named rightly | s beyond the deadline |"
    told = f"{sum(one.holds for one in found)} of {len(found)} named rightly within {MOST_SECONDS_MORE:g} s."
    return "\n".join((told, "", head, "|---|---|---|---|---|", *rows, *([""] if wrong else []), *wrong))


def _hanging(asked: RunRequest, planted: Planted) -> object:
    """A run in which a rank hangs."""
    durations.MIN_SECONDS = durations._MIN_FIRST_SECONDS = ALLOWED_SECONDS
    durations._MEASURED_FACTOR = durations._PREDICTED_FACTOR = 0.0
    watchdog._COLLECTIVE_SECONDS = ALLOWED_SECONDS
    if dist.get_rank() == planted.rank:
        _plant(planted.where, asked.out)
    return _run_locked(asked)


def _plant(where: str, out: Path) -> None:
    if where == "send":
        _replace(ExperienceTransport, "send", lambda *_: True, lambda: hang(out))
    elif where == "refit":
        _replace(RefitCopy, "run", lambda *_: True, lambda: hang(out))
    elif where in _COLLECTIVES:
        _in_collective(where, out)
    elif where.startswith(STOPPED):
        _replace(StageRunner, "run", lambda _, stage, __: stage == where.removeprefix(STOPPED), lambda: stop(out))
    else:
        _replace(StageRunner, "run", lambda _, stage, __: stage == where, lambda: hang(out))


def _in_collective(name: str, out: Path) -> None:
    """Where it is called for the first time in the third turn."""
    turns: list[int] = []
    begin = StageRunner.begin

    def begun(self: StageRunner, turn: int) -> None:
        turns.append(turn)
        begin(self, turn)

    StageRunner.begin = begun
    _replace(dist, name, lambda *_: len(turns) > 2, lambda: hang(out), calls=1)


def _replace(holder: Any, name: str, chosen: Callable[..., bool], then: Callable[[], None], *, calls: int = 3) -> None:
    """Has a function do something else where it is called so for the third time."""
    before, seen = getattr(holder, name), 0

    def instead(*arguments: Any, **named: Any) -> Any:
        nonlocal seen
        seen += chosen(*arguments)
        if seen == calls:
            seen += 1
            then()
        return before(*arguments, **named)

    setattr(holder, name, instead)


def hang(out: Path) -> None:
    """For ever; the moment is written down."""
    (out / _BEGAN).write_text(str(time.time()))
    while True:
        time.sleep(1.0)


def stop(out: Path) -> None:
    """As the system stops a process, half a second into what it does."""
    time.sleep(0.5)
    (out / _BEGAN).write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGSTOP)
