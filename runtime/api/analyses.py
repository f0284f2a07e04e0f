"""Analyses of a plan without running it, searches for alternatives to it, and re-planning of a running job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count as counting
from pathlib import Path

from meshwright.planner.analysis.alternatives import alternatives, memory_limited, runners_up
from meshwright.planner.analysis.cluster_sizing import Fit, pareto
from meshwright.planner.analysis.cluster_sizing import fit as fit_cluster
from meshwright.planner.analysis.explain import explain as explain_plan
from meshwright.planner.analysis.full_explanation import FullExplanation
from meshwright.planner.analysis.plan_comparison import PlanComparison, compare_plans
from meshwright.planner.analysis.plan_structures import (
    Ranked,
    SubspaceSearch,
    best_structures,
    ranked_by_simulation,
    whole_space_search,
)
from meshwright.planner.analysis.plan_summary import DEFAULT_NUM_STEPS, PlanSummary, summarise
from meshwright.planner.analysis.replan import Replanned, replan_from_run
from meshwright.planner.analysis.sensitivity import main_influences, sensitivities
from meshwright.planner.analysis.sensitivity import step_interval as interval_of_step
from meshwright.planner.analysis.whatif import WhatIf
from meshwright.planner.analysis.whatif import whatif as answer_settings
from meshwright.planner.job.job import Facts
from meshwright.planner.job.whatif_settings import Setting
from meshwright.planner.plan.cost_queries import CostModelBuilder
from meshwright.planner.plan.pins import Pin, parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import require_valid
from meshwright.planner.solver.result import Limits
from meshwright.profiles.table import Table
from meshwright.profiles.uncertainty import Interval
from meshwright.runtime.api.arguments import Pathname, cost_model_builder, limits_of, require_number
from meshwright.runtime.api.planning import Progress
from meshwright.runtime.device.garbage_collection import no_garbage_collection

_MAX_STRUCTURES = 100


def fit(
    facts: Facts,
    table: Table | None = None,
    *,
    sizes: Sequence[int] = (),
    price: float | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Fit:
    """The fewest ranks that a job needs, and the best plan on each of several numbers of ranks.

    `sizes` are the numbers of ranks to plan, by default the fewest and its doublings; `price` is that of a GPU-hour, in
    any currency. Raises BadInput for a size that is not a number of whole nodes.
    """
    require_number("price", price, minimum=0)
    with no_garbage_collection():
        return fit_cluster(
            facts, cost_model_builder(table), sizes=sizes, price=price, limits=limits_of(limits), progress=progress
        )


def compare(one: Plan, other: Plan) -> PlanComparison:
    """Two plans side by side: their steps and stages, by the costs that each plan records, and how their jobs differ.

    Raises BadInput for a plan that breaks a rule.

    >>> api.compare(plan, plan).difference.step_seconds
    0.0
    """
    require_valid(one)
    require_valid(other)
    return compare_plans(one, other)


def structures(
    best: Plan,
    table: Table | None = None,
    *,
    count: int,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> tuple[Ranked, ...]:
    """The `count` best plans that differ in some stage's layout, `best` among them, ranked by mean simulated step.

    Each takes several searches under the pins of `best`; the bound of each plan is one on the whole space. Fewer are
    returned if no more exist.
    Raises BadInput for a plan that breaks a rule.
    """
    model_of = cost_model_builder(table)
    search = whole_space_search(best, model_of(best.facts), limits_of(limits))
    return structures_by(search, best, model_of, pins=parse_pins(best.pins, best.graph), count=count, progress=progress)


def structures_by(
    search: SubspaceSearch,
    best: Plan,
    model_of: CostModelBuilder,
    *,
    pins: Sequence[Pin],
    count: int,
    progress: Progress | None,
) -> tuple[Ranked, ...]:
    """The best plans as in `structures`, found by the function `search` under these pins."""
    require_valid(best)
    require_number("count", count, minimum=1, maximum=_MAX_STRUCTURES)
    report = _search_counter(progress, "searching other structures", (count - 1) * len(best.graph.stages))
    with no_garbage_collection():
        plans = best_structures(best, pins, search, count=count, progress=report)
    return ranked_by_simulation(plans, model_of)


def summary(
    plan: Plan, table: Table | None = None, *, price: float | None = None, num_steps: int = DEFAULT_NUM_STEPS
) -> PlanSummary:
    """Summarise a plan: what fills its memory, which layouts come next, and what steps cost.

    The memory is that of the fullest rank, by part; each stage has its next best layout and why it is not chosen; the
    cost is that of `num_steps` steps. `price` is that of a GPU-hour, in any currency, and the table is the one that the
    plan was made with. Nothing is searched.
    Raises BadInput for a plan that breaks a rule.

    >>> answer = api.summary(plan, price=2.5, num_steps=100)
    >>> f"{answer.cost.gpu_hours:.0f} GPU-hours for {answer.cost.money:.0f}"
    '63 GPU-hours for 157'
    """
    require_valid(plan)
    require_number("price", price, minimum=0)
    require_number("num_steps", num_steps, minimum=1)
    return summarise(plan, cost_model_builder(table)(plan.facts), price=price, num_steps=num_steps)


def step_interval(plan: Plan, table: Table | None = None) -> Interval:
    """The 10th and 90th percentile of the step of a plan, in seconds, by what is uncertain in its costs.

    The table is the one that the plan was made with. Raises BadInput for a plan that breaks a rule.

    >>> range_of_step = api.step_interval(plan)
    >>> f"{plan.period_seconds:.0f} s, between {range_of_step.p10:.0f} and {range_of_step.p90:.0f} s in 8 of 10 cases"
    '283 s, between 258 and 311 s in 8 of 10 cases'
    """
    require_valid(plan)
    spread = table.spread if table else 0.0
    return interval_of_step(plan, cost_model_builder(table), measured=table is not None, spread=spread)


def explain(
    plan: Plan,
    table: Table | None = None,
    *,
    runner_ups: bool = False,
    sizes: Sequence[int] = (),
    price: float | None = None,
    num_steps: int = DEFAULT_NUM_STEPS,
    progress: Progress | None = None,
) -> FullExplanation:
    """Why a plan is as it is: the critical path of its period, the binding memory limits, and its sensitivities.

    With `runner_ups` it also has what each choice gains over the best plan without it, and with `sizes`, which are
    numbers of ranks, the best plan on each of them; both search again. `price` is that of a GPU-hour, in any currency;
    `num_steps` is the number of steps whose cost is reported. The table is the one that the plan was made with.
    Raises BadInput for a plan that breaks a rule and a size that is not a number of whole nodes.

    >>> why = api.explain(plan)
    >>> [wait.task for wait in why.explanation.critical_path][-1]
    'actor_train'
    >>> why.sensitivities[0].name
    'batch size'
    """
    require_valid(plan)
    require_number("price", price, minimum=0)
    require_number("num_steps", num_steps, minimum=1)
    model_of = cost_model_builder(table)
    model = model_of(plan.facts)
    why = FullExplanation(
        explanation=explain_plan(plan),
        summary=summarise(plan, model, price=price, num_steps=num_steps),
        memory_limited=memory_limited(plan, model),
        sensitivities=sensitivities(plan, model_of),
        main_influences=main_influences(
            plan, model_of, measured=table is not None, spread=table.spread if table else 0.0
        ),
    )
    if runner_ups:
        report = _search_counter(progress, "searching without each choice", len(plan.placements))
        other_choices = alternatives(plan, model, max_count=1)
        why = replace(why, alternatives=other_choices, runners_up=runners_up(plan, model, progress=report))
    if sizes:
        report = _search_counter(progress, "planning other sizes", len(sizes))
        why = replace(why, sizes=pareto(plan, sizes, model_of, price=price, progress=report))
    return why


def whatif(
    plan: Plan,
    settings: Sequence[Setting],
    table: Table | None = None,
    *,
    replan: bool = False,
    price: float | None = None,
    limits: Limits | None = None,
) -> WhatIf:
    """The step under other facts: one answer for each setting, as a difference from the plan.

    The same placements are re-evaluated or, with `replan`, the best plan is searched for each time, within `limits`.
    `price` is that of a GPU-hour. Raises BadInput for an unknown field and a value that breaks a rule.

    >>> what = api.whatif(plan, [{"workload.response.max": 512, "workload.response.fixed": 512}])
    >>> f"{what.answers[0].difference.step_seconds:+.0f} s"
    '-98 s'
    """
    require_valid(plan)
    require_number("price", price, minimum=0)
    return answer_settings(
        plan, settings, cost_model_builder(table), replan=replan, price=price, limits=limits_of(limits)
    )


def _search_counter(progress: Progress | None, what: str, total: int) -> Callable[[], None] | None:
    """A callback that reports one more search as done; the first report, of none done, is made at once."""
    if progress is None:
        return None
    report, done = progress, counting(1)
    report(what, 0, total)
    return lambda: report(what, next(done), total)


def replan(
    plan: Plan,
    run: Pathname,
    table: Table | None = None,
    *,
    facts: Facts | None = None,
    lost_nodes: int = 0,
    limits: Limits | None = None,
) -> Replanned:
    """The best plan for the rest of a run of `plan` on the remaining nodes, from measurements of its last steps.

    Lengths and speeds are those of these steps; a layout that the run used earlier has the speed measured then. `run`
    is the directory of the run, and `table` the one that the plan was made with, if any. `facts` are those of another
    job to continue with. The answer is found in the neighbourhood of the plan, without a bound; with `limits` a full
    search starts from it. The answer also has the seconds that the change of plan takes, and the number of steps
    after which they are regained.
    Raises BadInput for a plan that breaks a rule, a run of another plan, a trace that was not measured, and where no
    plan fits what is left.
    """
    require_valid(plan)
    search_limits = limits_of(limits) if limits else None
    return replan_from_run(plan, Path(run), table, facts=facts, lost_nodes=lost_nodes, limits=search_limits)
