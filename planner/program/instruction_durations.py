"""How long each instruction of a step takes: what a program needs besides its order to run in time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from meshwright.planner.plan.host_workers import host_seconds
from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.controllers import Setting
from meshwright.planner.program.program import MoveWeights
from meshwright.profiles.stages import GENERATE
from meshwright.profiles.trace import instruction_name


class HeldBlocks(NamedTuple):
    """Blocks of its cache that a replica's sequences hold while it generates: on average over its seconds, and at the
    peak."""

    mean: float
    most: int


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """One step's work. `seconds` has, by instruction name, one number for all ranks or one for each dp replica.

    `host_seconds` is how long rewards on hosts go on after the step's last response, where not as the plan expects.
    `tail_seconds` has, by stage, those of stages that stream in other chunks than the plan's, and `setting` what
    controllers decided about the turn that generates the step.

    Where lengths are drawn, `live_sequences` has, by stage, how many sequences each replica has in flight on average,
    `held_blocks` what they hold of its cache, nothing where that is not known, and `tokens_by_staleness` the response
    tokens by the number of actor updates between their drawing and their use.
    """

    seconds: Mapping[str, tuple[float, ...]]
    num_tokens: float  # response tokens of the step
    live_sequences: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    held_blocks: Mapping[str, tuple[HeldBlocks, ...]] = field(default_factory=dict)
    tokens_by_staleness: Mapping[int, int] = field(default_factory=dict)
    tail_seconds: Mapping[str, float] = field(default_factory=dict)
    host_seconds: float | None = None
    setting: Setting | None = None


class Durations(Protocol):
    """The work of every step; the same step has the same work however often it is asked."""

    @property
    def name(self) -> str:
        """What the seconds are: `planned`, `sampled`."""
        ...

    def of_step(self, step: int, /) -> StepWork: ...


class Planned:
    """Each stage and refit takes what the plan says it costs."""

    name = "planned"

    def __init__(self, plan: Plan) -> None:
        workload = plan.facts.workload
        self._work = StepWork(
            seconds={
                **{placement.stage: (placement.cost.total,) for placement in plan.placements},
                **refit_seconds(plan),
            },
            num_tokens=workload.batch_size * workload.drawn_lengths.mean,
        )

    def of_step(self, _step: int, /) -> StepWork:
        return self._work


@dataclass(frozen=True)
class Known:
    """The work of the first steps as another answer had it: no state, so that threads and processes may share it."""

    name: str
    works: tuple[StepWork, ...]

    def of_step(self, step: int, /) -> StepWork:
        return self.works[step]


def refit_seconds(plan: Plan) -> dict[str, tuple[float, ...]]:
    """Seconds of each refit of the plan, by the name of its instruction."""
    return {instruction_name(MoveWeights.kind, r.source, r.target): (r.cost.total,) for r in plan.refits}


@dataclass(frozen=True)
class Lags:
    """Seconds that pass after a producer has ended: `whole` until what it hands over has arrived, by producer and
    consumer, `of_hosts` of these what the plan expects rewards on hosts to take, and `tails` until a consumer that
    reads the last of it in chunks can end, by consumer."""

    whole: Mapping[tuple[str, str], float]
    tails: Mapping[str, float]
    of_hosts: float = 0.0


def lags_of(plan: Plan) -> Lags:
    """The hand-overs of a plan, those from hosts with what their rewards take after the last response; what streams
    has its tail to read after the last hand-over."""
    whole = {(edge.producer, edge.consumer): edge.cost.total - host_seconds(edge) for edge in plan.edges}
    waits = {edge.consumer: edge.cost.total for edge in plan.edges if edge.producer == GENERATE}
    whole |= {(edge.producer, edge.consumer): waits[edge.consumer] for edge in plan.graph.host_edges}
    tails = {p.stage: p.tail_seconds for p in plan.placements if p.schedule.chunk_tokens}
    return Lags(whole, tails, max(map(host_seconds, plan.edges), default=0.0))
