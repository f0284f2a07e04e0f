"""Sensitivity of a plan's period to its inputs, and the largest influences: kernel launches, the generation engine and
a hardware rate.

The same placements are re-evaluated with one input changed. Nothing is searched, so another plan may suit the changed
input better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshwright.cost_models.generation_cost import SCHEDULING
from meshwright.planner.job.job import Facts
from meshwright.planner.job.whatif_settings import with_setting
from meshwright.planner.plan.cost_queries import CostModelBuilder
from meshwright.planner.plan.layout_and_schedule_rules import has_even_rows
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.re_evaluate import re_evaluate, violations_under
from meshwright.profiles.frameworks import EAGER, GRAPH, EngineName, engine_named, own_engine
from meshwright.profiles.hardware import Cluster, MixedCluster
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.uncertainty import Interval, elasticity, interval, uncertainty

FACTOR = 1.1
"""The factor on an input: large enough to change whole numbers, small enough that the placements stay sensible."""


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The effect of one input on the period.

    `factor` is the relative size of the changed input. `elasticity` is log(period ratio) / log(factor): 1 means that
    the period is proportional to the input. If the placements are illegal with the changed input, `violations`
    says why and the numbers are None.
    """

    name: str
    factor: float
    period_seconds: float | None
    elasticity: float | None
    violations: tuple[str, ...] = ()


def sensitivities(plan: Plan, rebuild_cost_model: CostModelBuilder) -> tuple[Sensitivity, ...]:
    """Return the sensitivity to each input, the largest effect first."""
    return _sensitivities(
        plan, rebuild_cost_model, (*_hardware_inputs(plan.facts), _longer_responses(plan.facts), _larger_batch(plan))
    )


def rate_sensitivities(plan: Plan, rebuild_cost_model: CostModelBuilder) -> tuple[Sensitivity, ...]:
    """Return the sensitivities to hardware rates only; see `sensitivities`."""
    return _sensitivities(plan, rebuild_cost_model, _hardware_inputs(plan.facts))


def _sensitivities(
    plan: Plan, rebuild_cost_model: CostModelBuilder, inputs: Iterable[_LargerInput]
) -> tuple[Sensitivity, ...]:
    before = re_evaluate(plan, plan.facts, rebuild_cost_model(plan.facts)).period_seconds
    results = [_sensitivity(plan, rebuild_cost_model, before, larger) for larger in inputs]
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
    """The next larger batch of whole groups that the placements split evenly; if none is below twice the batch, twice
    the batch."""
    size, group_size = plan.facts.workload.batch_size, plan.facts.workload.group_size
    for larger in range(-(-math.ceil(size * FACTOR) // group_size) * group_size, 2 * size, group_size):
        facts = with_setting(plan.facts, {"workload.batch_size": larger})
        if _have_even_rows(plan, facts) and not violations_under(plan, facts):
            return _LargerInput("batch size", larger / size, facts)
    return _LargerInput("batch size", 2.0, with_setting(plan.facts, {"workload.batch_size": 2 * size}))


def _have_even_rows(plan: Plan, facts: Facts) -> bool:
    return all(has_even_rows(facts, plan.stage(p.stage), p.layout) for p in plan.placements)


def _sensitivity(plan: Plan, rebuild_cost_model: CostModelBuilder, before: float, larger: _LargerInput) -> Sensitivity:
    broken = violations_under(plan, larger.facts)
    if broken:
        return Sensitivity(
            name=larger.name, factor=larger.factor, period_seconds=None, elasticity=None, violations=broken
        )
    period = re_evaluate(plan, larger.facts, rebuild_cost_model(larger.facts)).period_seconds
    return Sensitivity(
        name=larger.name,
        factor=larger.factor,
        period_seconds=period,
        elasticity=elasticity(before, period, larger.factor),
    )


_BETWEEN_PARTS, _BETWEEN_NODES = "bandwidth between parts", "bandwidth between nodes"

_MIN_SHARE = 0.01
"""The smallest share of a step for which kernel launches are reported."""


@dataclass(frozen=True, kw_only=True)
class MainInfluences:
    """The largest influences on the step time.

    `launch_share` is the share of the step, 0 to 1, that kernel launches take; None for measured times, which include
    them. `other_seconds` is the step with `other_engine`, the other engine of this project, where that is possible.
    `rate` is the hardware rate that changes the step most. `p10_seconds` and `p90_seconds` are percentiles of the step,
    by what is uncertain in its costs.
    """

    engine: EngineName
    launch_share: float | None
    other_engine: EngineName | None
    other_seconds: float | None
    rate: Sensitivity
    p10_seconds: float
    p90_seconds: float

    @property
    def sentences(self) -> tuple[str, ...]:
        """Report lines."""
        return (
            f"generated by {self.engine}{''.join(self._launch_clauses())}",
            self._rate_line(),
            interval_sentence(Interval(self.p10_seconds, self.p90_seconds)),
        )

    def _launch_clauses(self) -> Iterator[str]:
        if self.launch_share is not None and self.launch_share >= _MIN_SHARE:
            yield f"; launches of kernels are {self.launch_share:.0%} of the step"
        if self.other_engine and self.other_seconds is not None:
            yield f"; with {self.other_engine} the same placements take {self.other_seconds:.4g} s"

    def _rate_line(self) -> str:
        changed = (self.rate.factor ** (self.rate.elasticity or 0.0)) - 1
        return f"most sensitive to {self.rate.name}: {self.rate.factor - 1:.0%} more changes the step by {changed:+.1%}"


def step_interval(
    plan: Plan, rebuild_cost_model: CostModelBuilder, *, measured: bool = False, spread: float = 0.0
) -> Interval:
    """Return the 10th and 90th percentile of the step of a valid plan, in seconds, by what is uncertain in its costs;
    `measured` says that its cost model has a table, and `spread` by how much its repeats differ."""
    rates = rate_sensitivities(plan, rebuild_cost_model)
    return interval(plan.period_seconds, [spread, *_deviations(plan, rates, measured=measured)])


def interval_sentence(step_seconds: Interval) -> str:
    """Return a report line on the interval of a step."""
    return f"8 of 10 such predictions are met by a step of {step_seconds.p10:.4g} to {step_seconds.p90:.4g} s"


def main_influences(
    plan: Plan, rebuild_cost_model: CostModelBuilder, *, measured: bool = False, spread: float = 0.0
) -> MainInfluences:
    """Return the largest influences on the step time of a valid plan; `measured` says that its cost model has a table,
    and `spread` by how much its repeats differ."""
    rates = [
        sensitivity
        for sensitivity in rate_sensitivities(plan, rebuild_cost_model)
        if sensitivity.elasticity is not None
    ]
    other = _other_engine(plan.facts)
    percentiles = interval(plan.period_seconds, [spread, *_deviations(plan, rates, measured=measured)])
    return MainInfluences(
        engine=plan.facts.engine,
        launch_share=None if measured else _launch_share(plan, rebuild_cost_model),
        other_engine=other,
        other_seconds=_seconds(plan, plan.facts.model_copy(update={"engine": other}), rebuild_cost_model)
        if other
        else None,
        rate=max(rates, key=lambda sensitivity: abs(sensitivity.elasticity or 0.0)),
        p10_seconds=percentiles.p10,
        p90_seconds=percentiles.p90,
    )


def _deviations(plan: Plan, rates: Iterable[Sensitivity], *, measured: bool) -> Iterator[float]:
    """Yield the relative standard deviations of the step: of each hardware rate, of the host and the loader of the
    engine, and of what the laws leave out."""
    known, facts = uncertainty(), plan.facts
    for rate in rates:
        yield (rate.elasticity or 0.0) * known.rates[
            rate.name.rpartition(": ")[2].replace(_BETWEEN_PARTS, _BETWEEN_NODES)
        ]
    scheduling = sum(placement.cost.amount(SCHEDULING) for placement in plan.placements)
    yield known.engine_host * scheduling / plan.period_seconds
    if not engine_named(facts.engine).refit.in_place:
        yield known.loader * sum(refit.cost.total for refit in plan.refits) / plan.period_seconds
    yield known.measured if measured else known.equations
    if facts.models.actor.experts:
        yield known.experts
    if facts.workload.response.fixed is None:
        yield known.lengths
    if not measured:
        yield from _device_deviations(facts)


def _device_deviations(facts: Facts) -> Iterator[float]:
    """Yield the deviation of equations for a CPU, or for a device whose constants are those of another."""
    known = uncertainty()
    if facts.cluster.kind == "cpu":
        yield known.cpu
    elif any(part.device.name not in known.measured_devices for part in facts.cluster.parts):
        yield known.unmeasured_device


def _launch_share(plan: Plan, rebuild_cost_model: CostModelBuilder) -> float:
    without_launches = with_setting(plan.facts, _zero_launch_seconds(plan.facts))
    return max(
        0.0, 1 - _seconds(plan, without_launches, rebuild_cost_model) / _seconds(plan, plan.facts, rebuild_cost_model)
    )


def _zero_launch_seconds(facts: Facts) -> Mapping[str, Any]:
    if isinstance(facts.cluster, MixedCluster):
        return {f"cluster.parts.{index}.device.launch_seconds": 0.0 for index in range(len(facts.cluster.parts))}
    return {"cluster.device.launch_seconds": 0.0}


def _other_engine(facts: Facts) -> EngineName | None:
    """The engine of this project that the plan does not use; None if it is not possible for the job."""
    if facts.engine == GRAPH:
        return EAGER
    default = own_engine(facts.cluster.kind, has_experts=facts.models.actor.experts is not None)
    return None if default == facts.engine else default


def _seconds(plan: Plan, facts: Facts, rebuild_cost_model: CostModelBuilder) -> float:
    return re_evaluate(plan, facts, rebuild_cost_model(facts)).period_seconds
