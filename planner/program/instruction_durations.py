"""The duration of each instruction of a step, which a program needs to be executed in virtual time."""

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
    """KV blocks that a replica's sequences hold while it generates: the mean over its seconds, and the peak."""

    mean: float
    peak: int


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The durations and other facts of one step.

    `seconds` has, by instruction name, one number for all ranks or one for each dp replica. `host_seconds` is how long
    host rewards take after the step's last response; None means as the plan expects. `tail_seconds` has, by stage, the
    tails of stages that stream in other chunks than the plan's. `setting` is the controllers' decision for the period
    that generates the step.

    If lengths are sampled, `live_sequences` has, by stage, the mean number of sequences in flight on each replica,
    `held_blocks` the KV blocks that they hold (empty if not known), and `tokens_by_staleness` the response tokens by
    the number of actor updates between sampling and use.
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
    """The work of every step; asking again for a step returns the same work."""

    @property
    def name(self) -> str:
        """The kind of durations: `planned` or `sampled`."""
        ...

    def of_step(self, step: int, /) -> StepWork: ...


class Planned:
    """Durations in which each stage and refit takes its planned cost."""

    name = "planned"

    def __init__(self, plan: Plan) -> None:
        workload = plan.facts.workload
        self._work = StepWork(
            seconds={
                **{placement.stage: (placement.cost.total,) for placement in plan.placements},
                **refit_seconds(plan),
            },
            num_tokens=workload.batch_size * workload.sampled_lengths.mean,
        )

    def of_step(self, _step: int, /) -> StepWork:
        return self._work


@dataclass(frozen=True)
class Precomputed:
    """Precomputed work of the first steps; it has no state, so threads and processes can share it."""

    name: str
    works: tuple[StepWork, ...]

    def of_step(self, step: int, /) -> StepWork:
        return self.works[step]


def refit_seconds(plan: Plan) -> dict[str, tuple[float, ...]]:
    """Return the seconds of each refit of the plan, by the name of its instruction."""
    return {instruction_name(MoveWeights.kind, r.source, r.target): (r.cost.total,) for r in plan.refits}


@dataclass(frozen=True)
class TransferDelays:
    """Delays after a producer has ended, in seconds.

    `whole` is the delay until its output has arrived, by producer and consumer; `of_hosts` the part of it that the plan
    expects host rewards to take. `tails` is the delay until a streaming consumer can end, by consumer.
    """

    transfers: Mapping[tuple[str, str], float]
    tails: Mapping[str, float]
    host_reward_seconds: float = 0.0


def transfer_delays(plan: Plan) -> TransferDelays:
    """Return the delays of a plan's transfers.

    Those from hosts include the time of their rewards after the last response. A streaming stage has its tail to
    process after the last chunk has arrived.
    """
    delays = {(edge.producer, edge.consumer): edge.cost.total - host_seconds(edge) for edge in plan.edges}
    waits = {edge.consumer: edge.cost.total for edge in plan.edges if edge.producer == GENERATE}
    delays |= {(edge.producer, edge.consumer): waits[edge.consumer] for edge in plan.graph.host_edges}
    tails = {p.stage: p.tail_seconds for p in plan.placements if p.schedule.chunk_tokens}
    return TransferDelays(delays, tails, max(map(host_seconds, plan.edges), default=0.0))
