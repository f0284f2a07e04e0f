"""The answer when no plan fits: what binds each stage and by how much, and the smallest changes that would help.

The limits come from our own relaxation (how much memory would be needed), not from a solver's infeasibility core. Every
change was asked about again and leaves a job that has a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from meshwright.cost_models.question import CostModel
from meshwright.planner.plan.calls import Remodel
from meshwright.planner.plan.edges import handovers
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import Pin
from meshwright.planner.plan.rules import room_on
from meshwright.planner.plan.settings import with_setting
from meshwright.planner.plan.steps_ahead import Scope, plain
from meshwright.planner.search.candidates import Candidate
from meshwright.planner.search.formulate import formulate
from meshwright.planner.search.frontier import Frontier, frontier, frontiers
from meshwright.planner.solver.dominance import undominated
from meshwright.planner.solver.result import Limits, OutOfTimeError
from meshwright.profiles.cluster import MixedCluster, most_usable_bytes
from meshwright.profiles.layout import Layout

_GIB = 2**30
_MIB = 2**20
_MOST_TIMES = 16
"""More nodes are looked for up to this many times the cluster."""

_SHORTEST_TAIL = 1 / 64
"""Responses are cut down to this share of their longest, no further: the job would be another one."""


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


@dataclass(frozen=True)
class _Need:
    """The choices of every stage whatever their size, and the least usable memory with which a plan exists.

    None when some stage has no legal choice at all.
    """

    stages: tuple[Frontier, ...]
    num_bytes: int | None

    def fits(self, facts: Facts) -> bool:
        """What a device lacks beside the largest counts as needed (see `formulate`)."""
        return self.num_bytes is not None and self.num_bytes <= most_usable_bytes(facts.cluster)


def refuse(
    facts: Facts,
    model: CostModel,
    *,
    pins: Sequence[Pin],
    status: str,
    limits: Limits,
    remodel: Remodel | None,
) -> NoPlan:
    """Why this job has no plan. Without `remodel`, only more memory is looked for.

    `model` and the models of `remodel` raise OutOfTimeError once the time is over; what is known of changes is told
    then, and that others were not asked about.
    """
    if status == "out_of_limit":
        sentence = f"no plan was found in {limits.max_deterministic_time:g} s; give more with --time-limit."
        if limits.stop is not None and limits.stop.is_set():
            sentence = "no plan was found before the search was asked to stop; let it go on for longer."
        return NoPlan(status="out_of_limit", limits=(Limit(stage=None, sentence=sentence),), changes=(), rejected={})
    need = _need(facts, model, pins, limits)
    changes, is_whole = list(_more_memory(facts, need)), True
    if remodel is not None:
        alone = [found.stage.name for found in need.stages if any(_limits_alone(facts, found))]
        fits = _asked_again(remodel, pins, limits, alone)
        is_whole = _all_in_time(changes, _shorter_response(facts, fits), _more_nodes(facts, fits))
    return NoPlan(
        status="infeasible",
        limits=(*_limits(facts, need), *(() if is_whole else (_UNASKED,))),
        changes=tuple(changes),
        rejected={found.stage.name: dict(found.rejected) for found in need.stages},
    )


_UNASKED = Limit(
    stage=None,
    sentence="the time was over before all shorter responses and more nodes were tried; give more with --time-limit.",
)


def _all_in_time(changes: list[Change], *looked_for: Iterator[Change]) -> bool:
    """Adds the changes that are found while there is time; whether there was for all."""
    try:
        for found in looked_for:
            changes += found
    except OutOfTimeError:
        return False
    return True


def impossible(facts: Facts, broken: Sequence[str]) -> NoPlan:
    """No training of the workload breaks none of these rules, which is known before anything is costed."""
    reasons = "; ".join(sentence.rstrip(".") for sentence in broken)
    trains = [stage.name for stage in facts.graph.stages if stage.trains]
    limits = tuple(Limit(stage=name, sentence=f"{name} has no legal choice: {reasons}.") for name in trains)
    return NoPlan(status="infeasible", limits=limits, changes=(), rejected={})


def unexplained() -> NoPlan:
    """No plan fits, and the time was over before it was known why."""
    sentence = "no plan fits, and the time was over before it was known why; give more with --time-limit."
    return NoPlan(status="infeasible", limits=(Limit(stage=None, sentence=sentence),), changes=(), rejected={})


def _scope(facts: Facts, pins: Sequence[Pin]) -> Scope:
    """The plainest in which there is what the pins fix."""
    fixed = {pin.key for pin in pins if not pin.forbids}
    runs_on = bool(fixed & {"batches_in_flight", "overcommit"})
    return replace(plain(facts.graph), offload="offload" in fixed, runs_on=runs_on)


def _need(facts: Facts, model: CostModel, pins: Sequence[Pin], limits: Limits) -> _Need:
    found = frontiers(facts, model, pins, is_limited=False, scope=_scope(facts, pins))
    from meshwright.planner.solver.solve import least_memory

    small = [_small_ones(one) for one in found]
    formulation = formulate(facts, model, small, handovers(facts, model))
    blocks = least_memory(formulation.problem, limits)
    return _Need(found, None if blocks is None else blocks * formulation.block_bytes)


def _small_ones(found: Frontier) -> Frontier:
    """The frontier without what another choice beats in memory, of the same layout where a copy may be shared: how long
    choices take does not matter here."""

    def kept(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
        alike: dict[Layout | None, list[Candidate]] = {}
        for one in candidates:
            alike.setdefault(one.layout if found.stage.may_share else None, []).append(one)
        return tuple(group[index] for group in alike.values() for index in undominated([one.held for one in group]))

    return replace(found, candidates={kind: kept(candidates) for kind, candidates in found.candidates.items()})


def _limits(facts: Facts, need: _Need) -> Iterator[Limit]:
    alone = [limit for found in need.stages for limit in _limits_alone(facts, found)]
    yield from alone
    if not alone and need.num_bytes is not None:
        usable = most_usable_bytes(facts.cluster)
        sentence = (
            f"each stage fits alone, and all together need {_size(need.num_bytes)} on a rank, "
            f"{_size(need.num_bytes - usable)} more than the {_size(usable)} that the device can use."
        )
        yield Limit(stage=None, sentence=sentence, needed_bytes=need.num_bytes, device_bytes=usable)


def _limits_alone(facts: Facts, found: Frontier) -> Iterator[Limit]:
    """What binds one stage even if it had the cluster to itself."""
    name = found.stage.name
    if not found.smallest:
        reasons = "; ".join(sentence.rstrip(".") for sentence, _ in found.rejected.most_common(3))
        yield Limit(stage=name, sentence=f"{name} has no legal choice: {reasons}.")
        return
    if not any(found.candidates.values()):
        yield Limit(
            stage=name, sentence=f"{name} has no choice whose offloaded state fits its part of the host's memory."
        )
        return
    lacking = {part: one.peak_bytes - _usable_on(facts, part) for part, one in found.smallest.items()}
    nearest = min(lacking, key=lambda part: lacking[part])
    if lacking[nearest] > 0:
        smallest, usable = found.smallest[nearest], _usable_on(facts, nearest)
        peak = math.ceil(smallest.peak_bytes)
        sentence = (
            f"{name} needs {_size(peak)} on a rank in its smallest form ({smallest.layout}), "
            f"{_size(peak - usable)} more than the {_size(usable)} that the device can use."
        )
        yield Limit(stage=name, sentence=sentence, needed_bytes=peak, device_bytes=usable)


def _asked_again(
    remodel: Remodel, pins: Sequence[Pin], limits: Limits, alone: Sequence[str]
) -> Callable[[Facts], bool]:
    """Whether a job with other facts has a plan: those stages that did not fit even `alone` are asked about first."""

    def fits(facts: Facts) -> bool:
        model, scope = remodel(facts), _scope(facts, pins)
        for name in alone:
            stage = facts.graph.by_name[name]
            if any(_limits_alone(facts, frontier(facts, model, stage, pins, is_limited=False, scope=scope))):
                return False
        return _need(facts, model, pins, limits).fits(facts)

    return fits


def _usable_on(facts: Facts, part: int) -> int:
    return room_on(facts, part)[0]


def _more_memory(facts: Facts, need: _Need) -> Iterator[Change]:
    """The smallest device, in whole GiB, or whole MiB when that is less than one, that leaves a plan.

    Of several kinds of nodes none is singled out.
    """
    if need.num_bytes is None or isinstance(facts.cluster, MixedCluster):
        return
    device = facts.cluster.device
    unit = _GIB if need.num_bytes >= _GIB else _MIB
    num_bytes = math.ceil(need.num_bytes / (1 - device.reserved_share) / unit) * unit
    yield Change(
        key="cluster.device.memory_bytes",
        value=num_bytes,
        sentence=f"devices of {_size(num_bytes)} instead of {_size(device.memory_bytes)}.",
    )


def _shorter_response(facts: Facts, fits: Callable[[Facts], bool]) -> Iterator[Change]:
    """The longest cut of the response tail among halvings that leaves a plan."""
    before = facts.workload.response.max
    longest = before // 2
    while longest >= before * _SHORTEST_TAIL:
        if fits(_with_response(facts, longest)):
            sentence = f"responses of at most {longest} tokens instead of {before}."
            yield Change(key="workload.response.max", value=longest, sentence=sentence)
            return
        longest //= 2


def _more_nodes(facts: Facts, fits: Callable[[Facts], bool]) -> Iterator[Change]:
    """The fewest nodes among doublings that leave a plan; of several kinds of nodes none is singled out."""
    before = facts.cluster
    if isinstance(before, MixedCluster):
        return
    times = 2
    while times <= _MOST_TIMES:
        cluster = before.model_copy(update={"nodes": before.nodes * times})
        if fits(with_setting(facts, {"cluster.nodes": cluster.nodes})):
            sentence = (
                f"{cluster.nodes} nodes ({cluster.num_ranks} ranks) instead of {before.nodes} "
                f"({before.num_ranks} ranks)."
            )
            yield Change(key="cluster.nodes", value=cluster.nodes, sentence=sentence)
            return
        times *= 2


def _with_response(facts: Facts, longest: int) -> Facts:
    fixed = facts.workload.response.fixed
    setting = {"workload.response.max": longest}
    if fixed is not None:
        setting["workload.response.fixed"] = min(fixed, longest)
    return with_setting(facts, setting)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.1f} MiB"
