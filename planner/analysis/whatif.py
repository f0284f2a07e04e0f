"""What-if: a plan under other facts (cluster, models or workload), as differences from the plan under its own.

The baseline and all answers use the same cost model. Without a new search the placements stay the same; with one, each
answer is the best plan for its facts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.cost_models.cost import Source
from meshwright.planner.analysis.plan_summary import run_cost
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.job.limits import position_violations
from meshwright.planner.job.whatif_settings import Setting, with_setting
from meshwright.planner.plan.cost_queries import CostModelBuilder
from meshwright.planner.plan.evaluate import free_bytes, host_bytes, items, ranks_of, task_name_of
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import verify
from meshwright.planner.search.no_plan import NoPlan
from meshwright.planner.search.re_evaluate import re_evaluate, re_evaluated_or_violation, violations_under
from meshwright.planner.solver.result import Limits
from meshwright.profiles.html_tables import html_paragraphs, html_table

_TOLERANCE = 1e-6
"""The relative difference above which a baseline that differs from the plan's own period is reported."""


@dataclass(frozen=True, kw_only=True)
class PlanMetrics:
    """The key numbers of a plan, or the differences between two plans."""

    step_seconds: float
    tokens_per_second: float  # response tokens
    idle_share: float  # of all ranks, 0 to 1
    headroom_bytes: float  # on the fullest rank; negative when it does not fit
    host_bytes: float  # in host memory, of the fullest node
    gpu_hours: float  # per 1000 steps
    money: float | None  # per 1000 steps, in the unit of the price

    def minus(self, other: PlanMetrics) -> PlanMetrics:
        return PlanMetrics(
            step_seconds=self.step_seconds - other.step_seconds,
            tokens_per_second=self.tokens_per_second - other.tokens_per_second,
            idle_share=self.idle_share - other.idle_share,
            headroom_bytes=self.headroom_bytes - other.headroom_bytes,
            host_bytes=self.host_bytes - other.host_bytes,
            gpu_hours=self.gpu_hours - other.gpu_hours,
            money=None if self.money is None or other.money is None else self.money - other.money,
        )


@dataclass(frozen=True, kw_only=True)
class Consequence:
    """The effect of one setting. Without `metrics` the placements are illegal or no plan was found, as `violations`
    says.

    `extrapolated` names the tasks whose cost is extrapolated beyond the measurements, and `notes` are caveats that the
    setting brings and the plan's own job does not have.
    """

    setting: Setting
    fits: bool
    violations: tuple[str, ...]
    metrics: PlanMetrics | None
    difference: PlanMetrics | None
    extrapolated: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The answers to a what-if; `notes` are caveats about the baseline."""

    baseline: PlanMetrics
    replanned: bool
    answers: tuple[Consequence, ...]
    notes: tuple[str, ...]

    def _repr_html_(self) -> str:
        """The answers in a notebook: a row for the plan, and for each setting."""
        headings = ("", "step s", "difference s", "response tokens/s", "GPU-hours of 1000 steps", "fits")
        rows = [("as planned", *_html_cells(self.baseline, None), "yes" if self.baseline.headroom_bytes >= 0 else "no")]
        for answer in self.answers:
            label = ", ".join(f"{path}={value}" for path, value in answer.setting.items())
            cells = _html_cells(answer.metrics, answer.difference) if answer.metrics else ("",) * 4
            rows.append((label, *cells, "yes" if answer.fits else " ".join(answer.violations)))
        return html_table(headings, rows) + html_paragraphs(self.notes)


def _html_cells(metrics: PlanMetrics, difference: PlanMetrics | None) -> tuple[str, str, str, str]:
    return (
        f"{metrics.step_seconds:.3f}",
        f"{difference.step_seconds:+.3f}" if difference else "",
        f"{metrics.tokens_per_second:,.0f}",
        f"{metrics.gpu_hours:,.1f}",
    )


def whatif(
    plan: Plan,
    settings: Sequence[Setting],
    rebuild_cost_model: CostModelBuilder,
    *,
    replan: bool = False,
    price: float | None = None,
    limits: Limits | None = None,
) -> WhatIf:
    """Answer each setting. `price` is that of a GPU-hour; `limits` bound each new search.

    Raises BadInput for an unknown field or a value that breaks a rule.
    """
    before = re_evaluate(plan, plan.facts, rebuild_cost_model(plan.facts))
    baseline = plan_metrics(before, price)
    answers, max_ranks, known_notes = [], 0, set(_truncated_quantiles(plan.facts))
    for setting in settings:
        facts = with_setting(plan.facts, setting)
        max_ranks = max(max_ranks, facts.cluster.num_ranks)
        answer = (
            _replanned(plan, facts, rebuild_cost_model, limits)
            if replan
            else _re_evaluated(plan, facts, rebuild_cost_model)
        )
        broken, after = answer
        consequence_metrics = plan_metrics(after, price) if after else None
        answers.append(
            Consequence(
                setting=setting,
                fits=not broken,
                violations=broken,
                metrics=consequence_metrics,
                difference=consequence_metrics.minus(baseline) if consequence_metrics else None,
                extrapolated=_extrapolated(after) if after else (),
                notes=tuple(note for note in _truncated_quantiles(facts) if note not in known_notes),
            )
        )
    return WhatIf(
        baseline=baseline,
        replanned=replan,
        answers=tuple(answers),
        notes=(
            *_baseline_notes(plan, before),
            *_search_notes(replan, (limits or Limits()).with_default_gap(max_ranks)),
        ),
    )


def plan_metrics(plan: Plan, price: float | None = None) -> PlanMetrics:
    """The key numbers of a plan, by its own costs."""
    cluster, workload, period = plan.facts.cluster, plan.facts.workload, plan.period_seconds
    busy = sum(item.cost.total * len(ranks_of(plan, item)) for item in items(plan))
    cost = run_cost(plan, price)
    return PlanMetrics(
        step_seconds=period,
        tokens_per_second=workload.batch_size * workload.sampled_lengths.mean / period,
        idle_share=1 - busy / (period * cluster.num_ranks),
        headroom_bytes=free_bytes(plan),
        host_bytes=host_bytes(plan),
        gpu_hours=cost.gpu_hours,
        money=cost.money,
    )


def _re_evaluated(
    plan: Plan, facts: Facts, rebuild_cost_model: CostModelBuilder
) -> tuple[tuple[str, ...], Plan | None]:
    """The rules that the same placements break, and the plan with them; no plan if a rule makes them illegal."""
    illegal = violations_under(plan, facts)
    if illegal:
        return illegal, None
    after = re_evaluate(plan, facts, rebuild_cost_model(facts))
    return verify(after), after


def _replanned(
    plan: Plan, facts: Facts, rebuild_cost_model: CostModelBuilder, limits: Limits | None
) -> tuple[tuple[str, ...], Plan | None]:
    """The reasons why there is no new plan, and the new plan or None."""
    if violations := position_violations(facts.models.by_name, facts.workload):
        return violations, None
    model = rebuild_cost_model(facts)
    kept = re_evaluated_or_violation(plan, facts, model, parse_pins(plan.pins, plan.graph))
    start = kept if isinstance(kept, Plan) else None
    planned = compile_plan(facts, model, pins=plan.pins, limits=limits, start=start)
    if isinstance(planned, NoPlan):
        return tuple(limit.sentence for limit in planned.limits) or ("no plan was found in time.",), None
    return (), planned


def _extrapolated(plan: Plan) -> tuple[str, ...]:
    return tuple(task_name_of(item) for item in items(plan) if item.cost.source is Source.EXTRAPOLATED)


def _truncated_quantiles(facts: Facts) -> Iterator[str]:
    """Notes on quantiles above the maximum length, where they have no further effect."""
    for what, lengths in (("prompt", facts.workload.prompt), ("response", facts.workload.response)):
        if lengths.p99 is not None and lengths.p99 > lengths.max:
            yield (
                f"workload.{what}.p99={lengths.p99:g} is limited by workload.{what}.max={lengths.max}; set both, or "
                f"workload.{what}.scale, a factor on all lengths."
            )


def _search_notes(replan: bool, limits: Limits) -> Iterator[str]:
    if replan and limits.tolerance:
        yield f"every new search stopped once it was proven to be within {limits.tolerance:.2g} of the best."


def _baseline_notes(plan: Plan, before: Plan) -> Iterator[str]:
    if abs(before.period_seconds - plan.period_seconds) > _TOLERANCE * plan.period_seconds:
        reason = (
            "give the table it was made with as --profile" if "profile" in plan.digests else "the cost model changed"
        )
        evaluated = f"{before.period_seconds:.6g} s here"
        yield f"the plan says {plan.period_seconds:.6g} s a step and is evaluated at {evaluated}; {reason}."
