"""Which inputs a plan is sensitive to: the same placements, in the same order, costed with one input a little larger.

Nothing is searched: another plan may suit the other input better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.planner.plan.calls import Remodel
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.rules import has_even_rows
from meshwright.planner.plan.settings import with_setting
from meshwright.planner.search.recost import illegal_under, recost
from meshwright.profiles.cluster import Cluster, MixedCluster
from meshwright.profiles.lengths import LengthSpec

FACTOR = 1.1
"""By which an input grows: enough for whole numbers to change, and little enough that the placements stay sensible."""


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """What one input does to a turn.

    `factor` is how many times as large the input became. `elasticity` is the relative change of the period over that of
    the input, in logarithms: 1 means that the period grows as the input does. Where the placements are not legal with
    the other input, `broken` says why and there are no numbers.
    """

    name: str
    factor: float
    period_seconds: float | None
    elasticity: float | None
    broken: tuple[str, ...] = ()


def sensitivities(plan: Plan, remodel: Remodel) -> tuple[Sensitivity, ...]:
    """One answer for each input, the one that matters most first."""
    return _answers(plan, remodel, (*_hardware(plan.facts), _longer_responses(plan.facts), _larger_batch(plan)))


def rate_sensitivities(plan: Plan, remodel: Remodel) -> tuple[Sensitivity, ...]:
    """As `sensitivities`, of the hardware alone."""
    return _answers(plan, remodel, _hardware(plan.facts))


def _answers(plan: Plan, remodel: Remodel, inputs: Iterable[_Larger]) -> tuple[Sensitivity, ...]:
    before = recost(plan, plan.facts, remodel(plan.facts)).period_seconds
    found = [_answer(plan, remodel, before, larger) for larger in inputs]
    return tuple(sorted(found, key=lambda one: -abs(one.elasticity or 0.0)))


class _Larger(NamedTuple):
    """One input, how many times as large it became, and the facts with it."""

    name: str
    factor: float
    facts: Facts


def _hardware(facts: Facts) -> Iterator[_Larger]:
    cluster = facts.cluster
    if isinstance(cluster, MixedCluster):
        for index, part in enumerate(cluster.parts):
            yield from _rates(facts, part, f"cluster.parts.{index}.", f"{part.device.name}: ")
        between = cluster.between.bytes_per_second * FACTOR
        faster = with_setting(facts, {"cluster.between.bytes_per_second": between})
        yield _Larger("bandwidth between parts", FACTOR, faster)
    else:
        yield from _rates(facts, cluster, "cluster.", "")


def _longer_responses(facts: Facts) -> _Larger:
    longer = facts.workload.model_copy(update={"response": _longer(facts.workload.response, FACTOR)})
    return _Larger("response length", FACTOR, facts.model_copy(update={"workload": longer}))


def _rates(facts: Facts, part: Cluster, path: str, name: str) -> Iterator[_Larger]:
    """The rates of the nodes of one kind, whose fields are under `path`."""
    peaks = part.device.flops_per_second
    faster = {**peaks, facts.precision: peaks[facts.precision] * FACTOR}
    yield _Larger(f"{name}compute peak", FACTOR, with_setting(facts, {f"{path}device.flops_per_second": faster}))
    rates = {
        "device.memory_bytes_per_second": ("memory bandwidth", part.device.memory_bytes_per_second),
        "device.launch_seconds": ("time to launch a kernel", part.device.launch_seconds),
        "intra_node.bytes_per_second": ("bandwidth in a node", part.intra_node.bytes_per_second),
        "inter_node.bytes_per_second": ("bandwidth between nodes", part.inter_node.bytes_per_second),
        "host.bytes_per_second": ("bandwidth to the host", part.host.bytes_per_second),
    }
    for field, (what, rate) in rates.items():
        if part.nodes > 1 or field != "inter_node.bytes_per_second":
            yield _Larger(f"{name}{what}", FACTOR, with_setting(facts, {path + field: rate * FACTOR}))


def _longer(lengths: LengthSpec, factor: float) -> LengthSpec:
    """Every length times the factor, in the form that was given."""
    scaled = {
        name: round(value * factor) if name in ("max", "fixed") else value * factor
        for name in ("max", "fixed", "median", "p99")
        if (value := getattr(lengths, name)) is not None
    }
    pairs = tuple((round(tokens * factor), weight) for tokens, weight in lengths.histogram or ())
    return LengthSpec(**scaled, histogram=pairs or None)


def _larger_batch(plan: Plan) -> _Larger:
    """The next larger batch of whole groups that the placements divide; twice the batch when there is none below."""
    size, group_size = plan.facts.workload.batch_size, plan.facts.workload.group_size
    for larger in range(-(-math.ceil(size * FACTOR) // group_size) * group_size, 2 * size, group_size):
        facts = with_setting(plan.facts, {"workload.batch_size": larger})
        if _divide(plan, facts) and not illegal_under(plan, facts):
            return _Larger("batch size", larger / size, facts)
    return _Larger("batch size", 2.0, with_setting(plan.facts, {"workload.batch_size": 2 * size}))


def _divide(plan: Plan, facts: Facts) -> bool:
    return all(has_even_rows(facts, plan.stage(p.stage), p.layout) for p in plan.placements)


def _answer(plan: Plan, remodel: Remodel, before: float, larger: _Larger) -> Sensitivity:
    broken = illegal_under(plan, larger.facts)
    if broken:
        return Sensitivity(name=larger.name, factor=larger.factor, period_seconds=None, elasticity=None, broken=broken)
    period = recost(plan, larger.facts, remodel(larger.facts)).period_seconds
    elasticity = math.log(period / before) / math.log(larger.factor)
    return Sensitivity(name=larger.name, factor=larger.factor, period_seconds=period, elasticity=elasticity)
