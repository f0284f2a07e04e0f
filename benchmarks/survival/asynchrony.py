"""Asynchronous runs under seeded delays: what is learned follows from the plan alone, bit for bit, and not from clocks.

Ranks are late before stages, refits and rounds of tokens, and messages before they are sent and when they have come, by
seconds that are drawn anew for every repeat. Undisturbed runs on one rank tell what other layouts are to learn.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.survival.job import Case, request_of, write_models
from benchmarks.survival.kills import APART
from meshwright.planner.simulation import pacing
from meshwright.planner.simulation.pacing import planned_rounds
from meshwright.profiles.stages import GENERATE
from meshwright.runtime.execution.megatron_device import StageRunner
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.run import RankRun
from meshwright.runtime.inference.chunk_streaming import Listeners
from meshwright.runtime.launch.launch import ProcessSetup, launch
from meshwright.runtime.messages.transport import Transport
from meshwright.runtime.training.refit import RefitCopy

STEPS = 8
REPEATS = 3
TOLERANCE = 1e-6
"""Between weights in any layouts that were trained on the same tokens."""
_RATE = 1e-4
"""By which Adam moves a weight in an update, whatever its gradient: the last digit of one near 0 decides where to."""
_MOST_SECONDS: Mapping[tuple[Any, str], float] = {
    (StageRunner, "run"): 0.1,
    (RefitCopy, "run"): 0.1,
    (Listeners, "on_round"): 0.01,
    (Transport, "send"): 0.02,
    (Transport, "receive"): 0.02,
}
"""By which each is late at most."""


Drawn: TypeAlias = Mapping[tuple[int, int], tuple[tuple[int, ...], ...]]
"""By step and row: the tokens that were trained on, and the versions of the weights that drew them."""
_ROWS = 8
"""Of a batch: a replica has slots for all of them that are in flight, in every layout."""
_AHEAD = {0: (0, 1), 1: (1, 1), 4: (2, 3)}
"""Of a staleness: the steps by which generation works ahead, and the batches in flight."""
_IN_FLIGHT = {staleness: (0, staleness + 1) for staleness in _AHEAD}
"""Where scores are streamed, which are of the step that is generated."""
_CHUNK_TOKENS = 2


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """Where stages run, and how."""

    name: str
    num_ranks: int
    pins: Sequence[str]
    num_replicas: int = 1
    """Of generation."""
    streams: bool = False

    def case(self, staleness: int) -> Case:
        """At a staleness."""
        ahead, in_flight = (_IN_FLIGHT if self.streams else _AHEAD)[staleness]
        generation = {"batches_in_flight": in_flight, "generation_slots": _ROWS * in_flight // self.num_replicas}
        streaming = {"reward_score": {"chunk_tokens": _CHUNK_TOKENS}} if self.streams and self.num_ranks > 1 else {}
        return Case(
            name=f"{self.name}, staleness {staleness}",
            num_ranks=self.num_ranks,
            pins=(*self.pins, "actor_generate.overcommit=0"),
            staleness=staleness,
            ahead=ahead,
            schedules={GENERATE: generation, **streaming},
            learning_rate=_RATE,
        )

    @property
    def alone(self) -> Layouts:
        """One rank, which draws as the plan does."""
        return replace(self, name="1 rank", num_ranks=1, num_replicas=1, pins=())


def _on(pool: str, *stages: str) -> tuple[str, ...]:
    return tuple(f"{stage}.pool={pool}" for stage in stages)


_LEARNING = ("actor_train", "actor_logprob", "critic_train", "critic_value", "ref_logprob")
LAYOUTS = (
    Layouts(name="tp2 and pp2", num_ranks=2, pins=("actor_generate.layout=tp2", "critic_train.layout=pp2")),
    Layouts(name="two pools", num_ranks=2, pins=APART),
    Layouts(
        name="two pools of two",
        num_ranks=4,
        pins=(
            *_on("0:2", "actor_generate", "reward_score"),
            *_on("2:2", *_LEARNING),
            "actor_generate.layout=dp2",
            "actor_train.layout=dp2",
        ),
        num_replicas=2,
    ),
    Layouts(
        name="scores streamed from two replicas",
        num_ranks=4,
        pins=(
            *_on("0:2", "actor_generate"),
            *_on("2:1", "reward_score"),
            *_on("3:1", *_LEARNING),
            "actor_generate.layout=dp2",
        ),
        num_replicas=2,
        streams=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What a run has trained on, the weights that it ended with, and the seconds of its turns."""

    drawn: Drawn
    weights: Mapping[str, Tensor]
    seconds: tuple[float, ...]

    @property
    def digest(self) -> str:
        """Of the weights, bit for bit."""
        found = hashlib.sha256()
        for name, tensor in sorted(self.weights.items()):
            found.update(name.encode() + tensor.view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    def apart(self, other: Learned) -> float:
        """The largest difference of any weight."""
        return max(float((tensor - other.weights[name]).abs().max()) for name, tensor in self.weights.items())


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """One plan at one staleness: its repeats, and the undisturbed run on one rank."""

    layouts: str
    staleness: int
    repeats: tuple[Learned, ...]
    alone: Learned

    @property
    def num_digests(self) -> int:
        """Different weights among the repeats."""
        return len({one.digest for one in self.repeats})

    @property
    def draws_alike(self) -> bool:
        """Whether the tokens are those of one rank, and of the same versions."""
        return self.repeats[0].drawn == self.alone.drawn

    @property
    def apart(self) -> float:
        """The largest difference from the weights of one rank."""
        return self.repeats[0].apart(self.alone)

    @property
    def holds(self) -> bool:
        """Whether every repeat has learned the same, bit for bit, and what one rank learns from the same tokens."""
        return self.num_digests == 1 and (self.apart <= TOLERANCE or not self.draws_alike)


def measure(scratch: Path, staleness: Sequence[int] = (0, 1, 4)) -> Iterator[Repeated]:
    """Every plan at every staleness, `REPEATS` times each."""
    write_models(scratch)
    for bound in staleness:
        alone: dict[tuple[bool, float], Learned] = {}
        for layouts in LAYOUTS:
            rounds = planned_rounds(request_of(scratch, layouts.case(bound), scratch / "run", STEPS).plan)
            how = layouts.streams, rounds
            if how not in alone:
                alone[how] = learned(scratch, layouts.alone, bound, rounds=rounds)
            repeats = tuple(learned(scratch, layouts, bound, seed=seed) for seed in range(1, REPEATS + 1))
            yield Repeated(layouts=layouts.name, staleness=bound, repeats=repeats, alone=alone[how])


def report(found: Sequence[Repeated]) -> str:
    """As a table of Markdown."""
    rows = [
        f"| {one.layouts} | {one.staleness} | {one.num_digests} | {'yes' if one.draws_alike else 'no'} | "
        f"{one.apart:.0e} |"
        for one in found
    ]
    head = f"| plan | staleness | different weights of {REPEATS} | drawn as on one rank | apart from its weights |"
    told = f"{sum(one.holds for one in found)} of {len(found)} plans learn the same in every repeat, bit for bit."
    return "\n".join((told, "", head, "|---|---|---|---|---|", *rows))


def learned(scratch: Path, layouts: Layouts, staleness: int, *, seed: int = 0, rounds: float | None = None) -> Learned:
    """A run of the models of `write_models`, with delays for a seed above 0, and with the rounds of tokens in a turn
    that another plan has time for."""
    case, out = layouts.case(staleness), scratch / "run"
    asked = request_of(scratch, case, out, STEPS)
    out.mkdir()
    try:
        how = {"setup": ProcessSetup("cpu"), "preload": "meshwright.runtime.execution.train"}
        ranks = launch(_carried_out, asked, seed, rounds, num_ranks=case.num_ranks, **how)
        drawn = {place: row for found, _ in ranks.values() for place, row in found.items()}
        return Learned(drawn=drawn, weights=_weights(out / "models" / f"step-{STEPS:06d}"), seconds=ranks[0][1])
    finally:
        shutil.rmtree(out)


def _weights(directory: Path) -> dict[str, Tensor]:
    return {
        f"{file.parent.name}/{name}": tensor
        for file in sorted(directory.glob("*/*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def _carried_out(asked: RunRequest, seed: int, rounds: float | None) -> tuple[Drawn, tuple[float, ...]]:
    """On one rank: what it trained on, and the seconds of its turns."""
    if rounds is not None:
        pacing.planned_rounds = lambda _: rounds
    if seed:
        draw = random.Random(f"{seed}/{dist.get_rank()}")
        for (holder, name), most in _MOST_SECONDS.items():
            _make_late(holder, name, most, draw)
    run, drawn, seconds = RankRun(asked), dict[tuple[int, int], tuple[tuple[int, ...], ...]](), list[float]()
    run.recorder.open(0)
    for turn in run.periods:
        began = time.perf_counter()
        batch = run.run_period(turn)
        seconds.append(time.perf_counter() - began)
        for row in batch.experience.rows("versions"):
            fields = (batch.experience.get(name, row).tolist() for name in ("tokens", "versions"))
            drawn[batch.step, row] = tuple(map(tuple, fields))
    run.finish()
    run.export(STEPS)
    run.close()
    return drawn, tuple(seconds)


def _make_late(holder: Any, name: str, most: float, draw: random.Random) -> None:
    """Before the call, and behind it for what has come."""
    punctual = getattr(holder, name)

    def late(*arguments: Any, **named: Any) -> Any:
        time.sleep(draw.uniform(0.0, most))
        found = punctual(*arguments, **named)
        if name == "receive":
            time.sleep(draw.uniform(0.0, most))
        return found

    setattr(holder, name, late)
