"""The report of a plan as one HTML file. It draws what `Contents` has, and computes no costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.planner.analysis.plan_summary import RunCost
from meshwright.planner.analysis.predicted_ranges import PredictedRanges
from meshwright.planner.analysis.whatif import plan_metrics
from meshwright.planner.job.custom_graph import OwnGraph
from meshwright.planner.plan.evaluate import fullest_rank
from meshwright.planner.plan.plan import Plan
from meshwright.planner.report import formatting
from meshwright.planner.report.contents import Contents
from meshwright.planner.report.inputs_section import facts, proof
from meshwright.planner.report.predicted_and_observed import predicted_and_observed
from meshwright.planner.report.rendering import render
from meshwright.planner.report.resource_sections import idle, memory, terms
from meshwright.planner.report.timelines import overview, period_timeline, timelines
from meshwright.planner.report.training_curves import training_section
from meshwright.planner.report.whatif_pages import sizes
from meshwright.profiles.uncertainty import Interval


@dataclass(frozen=True)
class _Card:
    """A figure at the top of the report.

    `clock` is SIMULATED or MEASURED, or empty for a predicted figure; `range` has its 10th and 90th percentile.
    """

    figure: str
    text: str
    clock: str = ""
    range: str = ""


def report(contents: Contents) -> str:
    """Return the text of the HTML file."""
    plan, models = contents.plan, contents.plan.facts.models
    roles = ", ".join(f"{role} {formatting.parameters(spec.num_params)}" for role, spec in models.by_name.items())
    sections = (
        overview(plan),
        period_timeline(plan),
        timelines(contents),
        memory(plan),
        idle(contents.simulation, plan.graph),
        terms(plan),
        predicted_and_observed(contents),
        training_section(contents.training_curves),
        sizes(contents.sizes),
        proof(plan),
        facts(plan),
    )
    return str(
        render(
            "report.html",
            title=_title(plan),
            lead=f"{roles} parameters",
            cards=_cards(contents),
            has_ranges=contents.ranges is not None,
            content=sections,
        )
    )


def _title(plan: Plan) -> str:
    algorithm = plan.facts.algorithm
    prefix = f"A plan of {algorithm}" if isinstance(algorithm, OwnGraph) else f"A {algorithm.upper()} plan"
    return f"{prefix} for {plan.facts.cluster.name}".replace(" x ", " × ")


def _cards(contents: Contents) -> tuple[_Card, ...]:
    plan, simulation, ranges = contents.plan, contents.simulation, contents.ranges
    plan_outlook = plan_metrics(plan)
    fullest = fullest_rank(plan.facts.cluster, plan.peak_bytes_per_rank)
    peak, usable = plan.peak_bytes_per_rank[fullest], plan.facts.cluster.usable_bytes(fullest)
    staleness = "synchronous" if not plan.staleness else f"at most {plan.facts.staleness} allowed"
    return (
        _Card(
            formatting.seconds(plan.period_seconds),
            "step time, predicted",
            range=_range(ranges.step_seconds if ranges else None, formatting.seconds),
        ),
        _Card(formatting.seconds(simulation.steps.mean), f"step time, {simulation.durations} durations", "SIMULATED"),
        _Card(
            formatting.count(plan_outlook.tokens_per_second),
            "response tokens/s, predicted",
            range=_range(ranges.tokens_per_second if ranges else None, formatting.count),
        ),
        _Card(formatting.percent(plan_outlook.idle_share), "of the ranks' time idle, predicted"),
        _Card(formatting.size(peak), f"on the fullest rank, of {formatting.size(usable)}"),
        _gap_card(plan),
        _Card(str(plan.staleness), f"staleness, {staleness}"),
        *_cost_cards(contents.cost, ranges),
    )


def _gap_card(plan: Plan) -> _Card:
    if plan.solver.status == "pinned":
        return _Card("no bound", "the placements were given, and nothing was searched")
    return _Card(formatting.percent(plan.solver.gap), "slower than the best plan, at most (the gap)")


def _cost_cards(cost: RunCost | None, ranges: PredictedRanges | None) -> tuple[_Card, ...]:
    """The GPU-hours and the cost in money of a number of steps, where they are known."""
    if cost is None:
        return ()
    steps = f"of {cost.num_steps:,} steps"
    hours = _Card(
        f"{cost.gpu_hours:,.1f}",
        f"GPU-hours {steps}, predicted",
        range=_range(ranges.gpu_hours if ranges else None, "{:,.1f}".format),
    )
    if cost.money is None:
        return (hours,)
    money = _Card(
        f"{cost.money:,.2f}",
        f"cost {steps}, at {cost.price:g} per GPU-hour",
        range=_range(ranges.money if ranges else None, "{:,.2f}".format),
    )
    return hours, money


def _range(percentiles: Interval | None, text_of: Callable[[float], str]) -> str:
    return "" if percentiles is None else formatting.interval(percentiles, text_of)
