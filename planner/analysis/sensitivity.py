"""Sensitivity of a plan's period to its inputs: the same placements re-evaluated with one input slightly larger.

Nothing is searched, so another plan may suit the larger input better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.planner.plan.calls import CostModelBuilder
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.rules import has_even_rows
from meshwright.planner.plan.settings import with_setting
from meshwright.planner.search.recost import re_evaluate, violations_under
from meshwright.profiles.cluster import Cluster, MixedCluster
from meshwright.profiles.lengths import LengthSpec

FACTOR = 1.1
"""The factor on an input: large enough to change whole numbers, small enough that the placements stay sensible."""


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The effect of one input on the period.

    `factor` is the relative size of the changed input. `elasticity` is log(period ratio) / log(factor): 1 means that
    the period is proportional to the input. If the placements are illegal with the changed input, `broken` says why and
    the numbers are None.
    """

    name: str
    factor: float
    period_seconds: float | None
    elasticity: float | None
    broken: tuple[str, ...] = ()


def sensitivities(plan: Plan, rebuild_cost_model: CostModelBuilder) -> tuple[Sensitivity, ...]:
    """Return the sensitivity to each input, the largest effect first."""
    return _sensitivities(
        plan, rebuild_cost_model, (*_hardware_inputs(plan.facts), _longer_responses(plan.facts), _larger_batch(plan))
    )


def rate_sensitivities(plan: Plan, rebuild_cost_model: CostModelBuilder) -> tuple[Sensitivity, ...]:
    """Return the sensitivities to hardware rates only; see `sensitivities`."""
    return _sensitivities(plan, rebuild_cost_model, _hardware_inputs(plan.facts))


def _sensitivities(plan: Plan, remodel: CostModelBuilder, inputs: Iterable[_LargerInput]) -> tuple[Sensitivity, ...]:
    before = re_evaluate(plan, plan.facts, remodel(plan.facts)).period_seconds
    results = [_sensitivity(plan, remodel, before, larger) for larger in inputs]
    return tuple(sorted(results, key=lambda one: -abs(one.elasticity or 0.0)))


class _LargerInput(NamedTuple):
    """One changed input: its name, its factor, and the facts with it."""

    name: str
    factor: float
    facts: Facts


def _hardware_inputs(facts: Facts) -> Iterator[_LargerInput]:
    cluster = facts.cluster
    if isinstance(cluster, MixedCluster):
        for index, part in enumerate(cluster.parts):
            yield from _rate_inputs(facts, part, f"cluster.parts.{index}.", f"{part.device.name}: ")
        between = cluster.between.bytes_per_second * FACTOR
        faster = with_setting(facts, {"cluster.between.bytes_per_second": between})
        yield _LargerInput("bandwidth between parts", FACTOR, faster)
    else:
        yield from _rate_inputs(facts, cluster, "cluster.", "")


def _longer_responses(facts: Facts) -> _LargerInput:
    longer = facts.workload.model_copy(update={"response": _scaled_lengths(facts.workload.response, FACTOR)})
    return _LargerInput("response length", FACTOR, facts.model_copy(update={"workload": longer}))


def _rate_inputs(facts: Facts, part: Cluster, path: str, name: str) -> Iterator[_LargerInput]:
    """The changed rates of the nodes of one kind, whose fields are under `path`."""
    peaks = part.device.flops_per_second
    faster = {**peaks, facts.precision: peaks[facts.precision] * FACTOR}
    yield _LargerInput(f"{name}compute peak", FACTOR, with_setting(facts, {f"{path}device.flops_per_second": faster}))
    rates = {
        "device.memory_bytes_per_second": ("memory bandwidth", part.device.memory_bytes_per_second),
        "device.launch_seconds": ("time to launch a kernel", part.device.launch_seconds),
        "intra_node.bytes_per_second": ("bandwidth in a node", part.intra_node.bytes_per_second),
        "inter_node.bytes_per_second": ("bandwidth between nodes", part.inter_node.bytes_per_second),
        "host.bytes_per_second": ("bandwidth to the host", part.host.bytes_per_second),
    }
    for field, (what, rate) in rates.items():
        if part.nodes > 1 or field != "inter_node.bytes_per_second":
            yield _LargerInput(f"{name}{what}", FACTOR, with_setting(facts, {path + field: rate * FACTOR}))


def _scaled_lengths(lengths: LengthSpec, factor: float) -> LengthSpec:
    """The lengths times a factor, in the same form."""
    scaled = {
        name: round(value * factor) if name in ("max", "fixed") else value * factor
        for name in ("max", "fixed", "median", "p99")
        if (value := getattr(lengths, name)) is not None
    }
    pairs = tuple((round(tokens * factor), weight) for tokens, weight in lengths.histogram or ())
    return LengthSpec(**scaled, histogram=pairs or None)


def _larger_batch(plan: Plan) -> _LargerInput:
    """The next larger batch of whole groups that the placements split evenly, or twice the batch if there is none
    below."""
    size, group_size = plan.facts.workload.batch_size, plan.facts.workload.group_size
    for larger in range(-(-math.ceil(size * FACTOR) // group_size) * group_size, 2 * size, group_size):
        facts = with_setting(plan.facts, {"workload.batch_size": larger})
        if _have_even_rows(plan, facts) and not violations_under(plan, facts):
            return _LargerInput("batch size", larger / size, facts)
    return _LargerInput("batch size", 2.0, with_setting(plan.facts, {"workload.batch_size": 2 * size}))


def _have_even_rows(plan: Plan, facts: Facts) -> bool:
    return all(has_even_rows(facts, plan.stage(p.stage), p.layout) for p in plan.placements)


def _sensitivity(plan: Plan, remodel: CostModelBuilder, before: float, larger: _LargerInput) -> Sensitivity:
    broken = violations_under(plan, larger.facts)
    if broken:
        return Sensitivity(name=larger.name, factor=larger.factor, period_seconds=None, elasticity=None, broken=broken)
    period = re_evaluate(plan, larger.facts, remodel(larger.facts)).period_seconds
    elasticity = math.log(period / before) / math.log(larger.factor)
    return Sensitivity(name=larger.name, factor=larger.factor, period_seconds=period, elasticity=elasticity)
