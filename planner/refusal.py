"""The answer when no plan fits: what binds each stage and by how much, and the smallest changes that would help.

The limits come from our own relaxation (how much memory would be needed), not from a solver's infeasibility core. Every
change was asked about again and leaves a job that has a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.cost_models.question import CostModel
from meshwright.planner.edges import handovers
from meshwright.planner.frontier import Frontier, frontiers
from meshwright.planner.job import Facts
from meshwright.planner.pins import Pin
from meshwright.planner.pose import BLOCK_BYTES, pose
from meshwright.planner.solver.result import Limits
from meshwright.planner.solver.solve import least_memory

_GIB = 2**30
_MOST_RANKS = 16
"""More ranks are looked for up to this many times the cluster."""

Remodel = Callable[[Facts], CostModel]


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One rule that binds. `stage` is None when all stages break it together; bytes are 0 when it is not memory."""

    stage: str | None
    sentence: str
    needed_bytes: int = 0
    device_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of the facts after which a plan exists, as `--set key=value` would write it."""

    key: str
    value: int
    sentence: str


@dataclass(frozen=True, kw_only=True)
class NoPlan:
    """No plan, and why. `out_of_limit` means that the search ended before it found or excluded one."""

    status: Literal["infeasible", "out_of_limit"]
    limits: tuple[Limit, ...]
    changes: tuple[Change, ...]
    rejected: Mapping[str, Mapping[str, int]]


def refuse(
    facts: Facts,
    model: CostModel,
    *,
    pins: Sequence[Pin],
    status: str,
    limits: Limits,
    remodel: Remodel | None,
) -> NoPlan:
    """Why this job has no plan. Without `remodel`, only more memory is looked for."""
    if status == "out_of_limit":
        sentence = f"no plan was found within max_deterministic_time={limits.max_deterministic_time}; allow more."
        return NoPlan(status="out_of_limit", limits=(Limit(stage=None, sentence=sentence),), changes=(), rejected={})
    every = frontiers(facts, model, pins, None)
    needed = _needed_bytes(facts, model, pins, limits)
    return NoPlan(
        status="infeasible",
        limits=tuple(_limits(facts, every, needed)),
        changes=tuple(_changes(facts, pins, needed, limits, remodel)),
        rejected={f.stage.name: dict(f.rejected) for f in every},
    )


def _needed_bytes(facts: Facts, model: CostModel, pins: Sequence[Pin], limits: Limits) -> int | None:
    """The least device memory with which a plan exists; None when a stage has no legal choice at any size."""
    found = frontiers(facts, model, pins, None)
    blocks = least_memory(pose(facts, model, found, handovers(facts, model)).problem, limits)
    return None if blocks is None else blocks * BLOCK_BYTES


def _limits(facts: Facts, every: Sequence[Frontier], needed: int | None) -> Iterator[Limit]:
    device = facts.cluster.device.usable_bytes
    alone = False
    for found in every:
        name = found.stage.name
        if found.smallest is None:
            alone = True
            reasons = "; ".join(sentence.rstrip(".") for sentence, _ in found.rejected.most_common(3))
            yield Limit(stage=name, sentence=f"{name} has no legal choice: {reasons}.")
        elif found.smallest.peak_bytes > device:
            alone = True
            peak = math.ceil(found.smallest.peak_bytes)
            yield Limit(
                stage=name,
                sentence=(
                    f"{name} needs {peak / _GIB:.1f} GiB on a rank in its smallest form ({found.smallest.layout}), "
                    f"{(peak - device) / _GIB:.1f} GiB more than the {device / _GIB:.1f} GiB that the device can use."
                ),
                needed_bytes=peak,
                device_bytes=device,
            )
    if not alone and needed is not None:
        sentence = (
            f"each stage fits alone, and all together need {needed / _GIB:.1f} GiB on a rank, "
            f"{(needed - device) / _GIB:.1f} GiB more than the {device / _GIB:.1f} GiB that the device can use."
        )
        yield Limit(stage=None, sentence=sentence, needed_bytes=needed, device_bytes=device)


def _changes(
    facts: Facts, pins: Sequence[Pin], needed: int | None, limits: Limits, remodel: Remodel | None
) -> Iterator[Change]:
    if needed is not None:
        gib = math.ceil(needed / (1 - facts.cluster.device.reserved_share) / _GIB)
        yield Change(
            key="cluster.device.memory_bytes",
            value=gib * _GIB,
            sentence=f"devices of {gib} GiB instead of {facts.cluster.device.memory_bytes / _GIB:.0f} GiB.",
        )
    if remodel is None:
        return

    def fits(other: Facts) -> bool:
        needs = _needed_bytes(other, remodel(other), pins, limits)
        return needs is not None and needs <= other.cluster.device.usable_bytes

    yield from _shorter_response(facts, fits)
    yield from _more_nodes(facts, fits)


def _shorter_response(facts: Facts, fits: Callable[[Facts], bool]) -> Iterator[Change]:
    """The longest cut of the response tail among halvings that leaves a plan."""
    longest = facts.workload.response.max
    while longest > 1:
        longest //= 2
        if fits(_with_response(facts, longest)):
            yield Change(
                key="workload.response.max",
                value=longest,
                sentence=f"responses of at most {longest} tokens instead of {facts.workload.response.max}.",
            )
            return


def _more_nodes(facts: Facts, fits: Callable[[Facts], bool]) -> Iterator[Change]:
    """The fewest nodes among doublings that leave a plan."""
    nodes = facts.cluster.nodes
    while nodes * 2 <= facts.cluster.nodes * _MOST_RANKS:
        nodes *= 2
        other = facts.model_copy(update={"cluster": facts.cluster.model_copy(update={"nodes": nodes})})
        if fits(other):
            ranks = other.cluster.num_ranks
            sentence = (
                f"{nodes} nodes ({ranks} ranks) instead of {facts.cluster.nodes} ({facts.cluster.num_ranks} ranks)."
            )
            yield Change(key="cluster.nodes", value=nodes, sentence=sentence)
            return


def _with_response(facts: Facts, longest: int) -> Facts:
    response = facts.workload.response
    fixed = None if response.fixed is None else min(response.fixed, longest)
    cut = response.model_copy(update={"max": longest, "fixed": fixed})
    return facts.model_copy(update={"workload": facts.workload.model_copy(update={"response": cut})})
