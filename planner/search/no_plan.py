"""Why no plan fits: the binding limits per stage with their excess, and the smallest changes that would help.

The limits come from a relaxation (how much memory would be needed), not from an infeasibility core of the solver. A job
with any of the suggested changes has a plan: each was checked by solving for the least memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from meshwright.cost_models.protocol import CostModel
from meshwright.planner.job.job import Facts
from meshwright.planner.job.whatif_settings import with_setting
from meshwright.planner.plan.cost_queries import CostModelBuilder, stage_transfers
from meshwright.planner.plan.layout_and_schedule_rules import available_bytes
from meshwright.planner.plan.pins import Pin
from meshwright.planner.plan.steps_ahead import SearchCase, synchronous_case
from meshwright.planner.search.choice_costs import NO_TIME_LIMIT, Candidate
from meshwright.planner.search.formulate import MIN_UNIT_BYTES, formulate
from meshwright.planner.search.frontiers import Frontier, PoolKind, frontier, frontiers
from meshwright.planner.solver.pareto import undominated
from meshwright.planner.solver.result import Limits, OutOfTimeError
from meshwright.profiles.hardware import MixedCluster, max_usable_bytes
from meshwright.profiles.layout import Layout

_GIB = 2**30
_MIB = 2**20
_MAX_NODES_FACTOR = 16
"""More nodes are tried up to this multiple of the cluster."""

_MAX_HALVINGS = 6
"""Responses are shortened to no less than a 64th of their maximum, to keep the job recognisable."""

_TIGHT_SHARE = 1 / 64
"""A job that leaves less than this share of a device free is left to the solver, whose units may be larger."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One binding limit. `stage` is None if all stages violate it together; bytes are 0 if it is not about memory."""

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
    """The result of a search without a plan; `out_of_limit` means that it ended before it found or excluded one.

    `rejected` has, by stage, the number of choices that were rejected for each reason.
    """

    status: Literal["infeasible", "out_of_limit"]
    limits: tuple[Limit, ...]
    changes: tuple[Change, ...]
    rejected: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class _Need:
    """The choices of every stage whatever their memory, and the least device memory with which a plan exists.

    `num_bytes` is None if some stage has no legal choice at all.
    """

    stages: tuple[Frontier, ...]
    num_bytes: int | None

    def fits(self, facts: Facts) -> bool:
        """True if the needed memory fits the largest device; `formulate` has added what smaller devices lack."""
        return self.num_bytes is not None and self.num_bytes <= max_usable_bytes(facts.cluster)


def explain_no_plan(
    facts: Facts,
    model: CostModel,
    *,
    pins: Sequence[Pin],
    status: str,
    limits: Limits,
    rebuild_cost_model: CostModelBuilder | None,
) -> NoPlan:
    """Explain why this job has no plan. Without `rebuild_cost_model`, only more memory is tried as a change.

    `model` and the models that `rebuild_cost_model` builds raise OutOfTimeError once time is up; the changes found
    until then are returned, with a note that others were not tried.
    """
    if status == "out_of_limit":
        sentence = f"no plan was found in {limits.max_deterministic_time:g} s; give more with --time-limit."
        if limits.stop is not None and limits.stop.is_set():
            sentence = "no plan was found before the search was asked to stop; let it run longer."
        return NoPlan(status="out_of_limit", limits=(Limit(stage=None, sentence=sentence),), changes=(), rejected={})
    need = _need(facts, model, pins, limits)
    changes, tried_all = list(_more_memory(facts, need)), True
    if rebuild_cost_model is not None:
        stages_too_large = [frontier.stage.name for frontier in need.stages if any(_limits_of_stage(facts, frontier))]
        changed = _ChangedJob(
            rebuild_cost_model=rebuild_cost_model, pins=pins, limits=limits, stages_too_large=stages_too_large
        )
        tried_all = _extend_in_time(changes, _shorter_response(facts, changed), _more_nodes(facts, changed.has_plan))
    return NoPlan(
        status="infeasible",
        limits=(*_limits(facts, need), *(() if tried_all else (_UNTRIED,))),
        changes=tuple(changes),
        rejected={frontier.stage.name: dict(frontier.rejected) for frontier in need.stages},
    )


_UNTRIED = Limit(
    stage=None,
    sentence="time ran out before all shorter responses and larger clusters were tried; give more with --time-limit.",
)


def _extend_in_time(changes: list[Change], *searches: Iterator[Change]) -> bool:
    """Append the changes that are found in time; True if all were tried."""
    try:
        for changes_found in searches:
            changes += changes_found
    except OutOfTimeError:
        return False
    return True


def no_legal_training(facts: Facts, broken: Sequence[str]) -> NoPlan:
    """Return the result for a workload on which every training choice violates one of these rules.

    That is known before anything is costed.
    """
    reasons = "; ".join(sentence.rstrip(".") for sentence in broken)
    trains = [stage.name for stage in facts.graph.stages if stage.trains]
    limits = tuple(Limit(stage=name, sentence=f"{name} has no legal choice: {reasons}.") for name in trains)
    return NoPlan(status="infeasible", limits=limits, changes=(), rejected={})


def unexplained_no_plan() -> NoPlan:
    """Return the result if no plan fits and time ran out before the reason was known."""
    sentence = "no plan fits, and time ran out before the reason was found; give more with --time-limit."
    return NoPlan(status="infeasible", limits=(Limit(stage=None, sentence=sentence),), changes=(), rejected={})


def _search_case(facts: Facts, pins: Sequence[Pin]) -> SearchCase:
    """Return the simplest search case in which the choices that the pins fix exist."""
    fixed_keys = {pin.key for pin in pins if not pin.forbids}
    keeps_in_flight = bool(fixed_keys & {"batches_in_flight", "overcommit"})
    return replace(synchronous_case(facts.graph), offload="offload" in fixed_keys, keeps_in_flight=keeps_in_flight)


def _need(facts: Facts, model: CostModel, pins: Sequence[Pin], limits: Limits) -> _Need:
    case = _search_case(facts, pins)
    stage_frontiers = frontiers(facts, model, pins, is_limited=False, is_timed=False, search_case=case)
    from meshwright.planner.solver.solve import least_memory  # already loaded by `load_solver`

    reduced = [_smallest_in_memory(stage_frontier) for stage_frontier in stage_frontiers]
    formulation = formulate(facts, model, reduced, stage_transfers(facts, model), is_timed=False)
    units = least_memory(formulation.problem, limits)
    return _Need(stage_frontiers, None if units is None else units * formulation.unit_bytes)


def _smallest_in_memory(stage_frontier: Frontier) -> Frontier:
    """Return the frontier reduced to the choices that are Pareto-optimal in memory; time does not matter here.

    For a stage that may share a copy of its weights, only choices with the same layout are compared.
    """

    def smallest(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
        groups: dict[Layout | None, list[Candidate]] = {}
        for candidate in candidates:
            groups.setdefault(candidate.layout if stage_frontier.stage.may_share else None, []).append(candidate)
        return tuple(
            group[index]
            for group in groups.values()
            for index in undominated([candidate.device_bytes for candidate in group])
        )

    return replace(
        stage_frontier,
        candidates={kind: smallest(candidates) for kind, candidates in stage_frontier.candidates.items()},
    )


def _limits(facts: Facts, need: _Need) -> Iterator[Limit]:
    alone = [limit for stage_frontier in need.stages for limit in _limits_of_stage(facts, stage_frontier)]
    yield from alone
    if not alone and need.num_bytes is not None:
        usable = max_usable_bytes(facts.cluster)
        sentence = (
            f"each stage fits alone, and all together need {_size(need.num_bytes)} on a rank, "
            f"{_size(need.num_bytes - usable)} more than the {_size(usable)} that the device can use."
        )
        yield Limit(stage=None, sentence=sentence, needed_bytes=need.num_bytes, device_bytes=usable)


def _limits_of_stage(facts: Facts, stage_frontier: Frontier) -> Iterator[Limit]:
    """Yield the limit that a stage violates even if it has the cluster to itself, if there is one."""
    name = stage_frontier.stage.name
    if not stage_frontier.smallest:
        reasons = "; ".join(sentence.rstrip(".") for sentence, _ in stage_frontier.rejected.most_common(3))
        yield Limit(stage=name, sentence=f"{name} has no legal choice: {reasons}.")
        return
    if not any(stage_frontier.candidates.values()):
        yield Limit(
            stage=name, sentence=f"{name} has no choice whose offloaded state fits its part of the host's memory."
        )
        return
    excess = {
        part: candidate.peak_bytes - _usable_bytes(facts, part) for part, candidate in stage_frontier.smallest.items()
    }
    closest = min(excess, key=lambda part: excess[part])
    if excess[closest] > 0:
        smallest, usable = stage_frontier.smallest[closest], _usable_bytes(facts, closest)
        peak = math.ceil(smallest.peak_bytes)
        sentence = (
            f"{name} needs {_size(peak)} on a rank in its smallest form ({smallest.layout}), "
            f"{_size(peak - usable)} more than the {_size(usable)} that the device can use."
        )
        yield Limit(stage=name, sentence=sentence, needed_bytes=peak, device_bytes=usable)


@dataclass(frozen=True, kw_only=True)
class _ChangedJob:
    """Tells if the job has a plan after a change of its facts.

    `stages_too_large` are those that do not fit even alone before the change; after one, they are checked first.
    """

    rebuild_cost_model: CostModelBuilder
    pins: Sequence[Pin]
    limits: Limits
    stages_too_large: Sequence[str]

    def stages_fit_alone(self, facts: Facts) -> bool:
        """Return True if each of the stages that were too large fits on a cluster of its own."""
        return not self.stages_too_large or self._fit_alone(facts, self.rebuild_cost_model(facts))

    def has_plan(self, facts: Facts) -> bool:
        model = self.rebuild_cost_model(facts)
        if not self._fit_alone(facts, model):
            return False
        if _fits_on_all_ranks(facts, model, self.pins):
            return True
        return _need(facts, model, self.pins, self.limits).fits(facts)

    def _fit_alone(self, facts: Facts, model: CostModel) -> bool:
        search_case = _search_case(facts, self.pins)
        for name in self.stages_too_large:
            stage = facts.graph.by_name[name]
            alone = frontier(facts, model, stage, self.pins, is_limited=False, is_timed=False, search_case=search_case)
            if any(_limits_of_stage(facts, alone)):
                return False
        return True


def _fits_on_all_ranks(facts: Facts, model: CostModel, pins: Sequence[Pin]) -> bool:
    """Return True if all stages fit together on one pool of all ranks, without shared weights; False decides nothing.

    Each stage takes its choice of least peak memory, rounded up as in a search. Only that pool is costed, and no solver
    is needed.
    """
    if isinstance(facts.cluster, MixedCluster):
        return False
    search_case, all_ranks = _search_case(facts, pins), PoolKind(0, facts.cluster.num_ranks)
    resident_units, transient_units = 0, 0
    for stage in facts.graph.stages:
        on_all_ranks = frontier(
            facts,
            model,
            stage,
            pins,
            is_timed=False,
            search_case=search_case,
            time_limits={all_ranks: NO_TIME_LIMIT},
        )
        candidates = on_all_ranks.candidates.get(all_ranks, ())
        if not candidates:
            return False
        smallest = min(candidates, key=lambda candidate: candidate.peak_bytes)
        private, weights, transient = (math.ceil(num_bytes / MIN_UNIT_BYTES) for num_bytes in smallest.device_bytes)
        resident_units += private + weights
        transient_units = max(transient_units, transient)
    num_bytes = (resident_units + transient_units) * MIN_UNIT_BYTES
    return num_bytes <= (1 - _TIGHT_SHARE) * max_usable_bytes(facts.cluster)


def _usable_bytes(facts: Facts, part: int) -> int:
    return available_bytes(facts, part)[0]


def _more_memory(facts: Facts, need: _Need) -> Iterator[Change]:
    """Yield the smallest device memory with which a plan exists, in whole GiB, or in whole MiB below one GiB.

    A cluster with several kinds of nodes gets no suggestion.
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


def _shorter_response(facts: Facts, changed: _ChangedJob) -> Iterator[Change]:
    """Yield the longest maximum response length, among successive halvings, with which a plan exists.

    None is tried if a stage is too large even with the shortest.
    """
    before = facts.workload.response.max
    lengths = [before // 2**halvings for halvings in range(1, _MAX_HALVINGS + 1) if before >= 2**halvings]
    if not lengths or not changed.stages_fit_alone(_with_response(facts, lengths[-1])):
        return
    for longest in lengths:
        if changed.has_plan(_with_response(facts, longest)):
            sentence = f"responses of at most {longest} tokens instead of {before}."
            yield Change(key="workload.response.max", value=longest, sentence=sentence)
            return


def _more_nodes(facts: Facts, has_plan: Callable[[Facts], bool]) -> Iterator[Change]:
    """Yield the smallest number of nodes, among successive doublings, with which a plan exists.

    A cluster with several kinds of nodes gets no suggestion.
    """
    before = facts.cluster
    if isinstance(before, MixedCluster):
        return
    factor = 2
    while factor <= _MAX_NODES_FACTOR:
        cluster = before.model_copy(update={"nodes": before.nodes * factor})
        if has_plan(with_setting(facts, {"cluster.nodes": cluster.nodes})):
            sentence = (
                f"{cluster.nodes} nodes ({cluster.num_ranks} ranks) instead of {before.nodes} "
                f"({before.num_ranks} ranks)."
            )
            yield Change(key="cluster.nodes", value=cluster.nodes, sentence=sentence)
            return
        factor *= 2


def _with_response(facts: Facts, longest: int) -> Facts:
    fixed = facts.workload.response.fixed
    setting = {"workload.response.max": longest}
    if fixed is not None:
        setting["workload.response.fixed"] = min(fixed, longest)
    return with_setting(facts, setting)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.1f} MiB"
