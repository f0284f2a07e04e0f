"""Re-planning of a running job: the best plan from now on, the cost of moving to it, and when that is paid back.

    facts    = facts of the plan, with the lengths that the run observed and without lost nodes
    seconds  = predicted seconds of a stage x (its measured / predicted seconds in the run, at the observed lengths)
    moving   = seconds to move weights (of copies that no refit updates), optimizer states, and sequences in flight
    payback  = moving / (seconds of a step with the old plan - with the new plan), in steps

Ranks are renumbered when nodes are lost. State that was lost with them comes from a replica or a checkpoint,
which is assumed to be as fast as a move between ranks. The start of processes is not counted. Observations come from
the directory of a run; after a change of plan it keeps the earlier plan with its trace (`profiles/run_logs.py`).
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshwright.cost_models.cost import WEIGHTS, Cost, Term
from meshwright.cost_models.protocol import (
    CostModel,
    DelegatingCostModel,
    LayoutCosts,
    QueriedLayoutCosts,
    RefitQuery,
    SecondsColumns,
    StageQuery,
)
from meshwright.planner.analysis.calibration import Calibration, calibrate
from meshwright.planner.analysis.trace_analysis import observe_run
from meshwright.planner.compile import best_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.pins import Pin, parse_pins
from meshwright.planner.plan.plan import Placement, Plan, read_plan, read_run_plan
from meshwright.planner.search.neighbourhood import best_plan_nearby
from meshwright.planner.search.re_evaluate import re_evaluate, re_evaluated_or_violation
from meshwright.planner.search.search_control import ProgressCallback
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.solver.result import Limits
from meshwright.profiles.choice_table import ChoiceTable
from meshwright.profiles.documents import digest
from meshwright.profiles.errors import BadInput
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.observations import observe_workload
from meshwright.profiles.run_logs import former_plans
from meshwright.profiles.stages import GENERATE, Stage
from meshwright.profiles.table import Table
from meshwright.profiles.trace import Span, read_last_spans
from meshwright.profiles.workload import lengths_of_workload, workload_with_lengths

_OPTIMIZER_TERMS = ("main weights", "moments")
"""The cost terms of the optimizer state of a training stage."""


@dataclass(frozen=True, kw_only=True)
class Moving:
    """A move of state between ranks before the first step of another plan.

    `what` names the state; `num_bytes` is its total size.
    """

    what: str
    num_bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Simulated mean seconds of a step with sampled lengths, with the old plan (`old_plan_seconds`) and the new one."""

    old_plan_seconds: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Replanned:
    """The result of re-planning.

    `old_plan_seconds` is the step time if the old plan is kept; None if that is impossible, and then `reason_not_kept`
    is a sentence with the rule that it violates. `break_even_steps` is the number of steps after which moving is paid
    back: None if it never is, and 0 if the old plan cannot be kept. `relative_error` is the error of the step time that
    was predicted for the old plan, if that plan came from re-planning too.
    """

    plan: Plan
    old_plan_seconds: float | None
    reason_not_kept: str
    moving: tuple[Moving, ...]
    break_even_steps: int | None
    relative_error: float = 0.0
    simulated: Simulated | None = None

    @property
    def moving_seconds(self) -> float:
        return math.fsum(one.seconds for one in self.moving)

    def payback_steps_with_pause(self, pause_seconds: float) -> int | None:
        """The number of steps after which moving, with a pause of the run, is paid back by the predicted or the
        simulated saving, whichever is less.

        None unless the relative saving exceeds both the gap that a search may leave and `relative_error`; 0 if the old
        plan cannot be kept.
        """
        if self.old_plan_seconds is None:
            return 0
        saved, limits = (
            self.old_plan_seconds - self.plan.period_seconds,
            Limits().with_default_gap(self.plan.facts.cluster.num_ranks),
        )
        if self.simulated:
            saved = min(saved, self.simulated.old_plan_seconds - self.simulated.seconds)
        if saved <= self.old_plan_seconds * max(limits.tolerance, self.relative_error):
            return None
        return math.ceil((self.moving_seconds + pause_seconds) / saved)


@dataclass(frozen=True)
class PacedCostModel(DelegatingCostModel):
    """A cost model whose seconds are scaled by the pace of each stage: its measured / predicted seconds in a run.

    `layout_factors` has the factors of layouts that the run has used. In any other layout a stage has its current
    factor, from `factors`.
    """

    factors: Mapping[str, float]
    layout_factors: Mapping[tuple[str, Layout], float] = field(default_factory=dict)

    def lower_bound_seconds(self, stage: Stage, model: ModelSpec, num_ranks: int, part: int) -> float:
        return super().lower_bound_seconds(stage, model, num_ranks, part) * self._min_factor(stage)

    def generation_lower_bound(self, query: StageQuery) -> float:
        return super().generation_lower_bound(query) * self._factor(query)

    def seconds(self, query: StageQuery) -> Cost:
        cost, factor = super().seconds(query), self._factor(query)
        return Cost(tuple(Term(t.name, t.amount * factor, t.source) for t in cost.terms)) if factor != 1 else cost

    def seconds_of_choices(self, query: StageQuery, choices: ChoiceTable) -> SecondsColumns:
        seconds, tail_seconds = super().seconds_of_choices(query, choices)
        paces = choices.layout.expand_to_choices([[self.pace(query.stage.name, layout)] for layout in choices.layouts])[
            0
        ]
        return SecondsColumns(paces * seconds, paces * tail_seconds)

    def on_layout(self, query: StageQuery) -> LayoutCosts:
        return QueriedLayoutCosts(self, query)

    def tail_seconds(self, query: StageQuery) -> float:
        return super().tail_seconds(query) * self._factor(query)

    def pace(self, stage: str, layout: Layout) -> float:
        """The factor of a stage in a layout: measured over predicted seconds."""
        in_layout = self.layout_factors.get((stage, layout))
        return self.factors.get(stage, 1.0) if in_layout is None else in_layout

    def _factor(self, query: StageQuery) -> float:
        return self.pace(query.stage.name, query.layout)

    def _min_factor(self, stage: Stage) -> float:
        layout_factors = (factor for (name, _), factor in self.layout_factors.items() if name == stage.name)
        return min(self.factors.get(stage.name, 1.0), *layout_factors, math.inf)


def pace_factors(calibration: Calibration) -> dict[str, float]:
    """The ratio of measured to predicted seconds of each stage in a run, at the lengths of that run."""
    return {row.stage: row.measured_seconds / row.before_seconds for row in calibration.rows if row.before_seconds}


def facts_of_run(plan: Plan, facts: Facts, spans: Sequence[Span], *, lost_nodes: int = 0) -> Facts:
    """Return the facts of a job with the lengths that a run of the plan observed, without the nodes that were lost.

    Raises BadInput for a trace that cannot be used, if no node is left, and for lost nodes of a cluster that has
    several kinds of nodes.
    """
    observation = observe_run(plan, spans)
    workload = workload_with_lengths(facts.workload, lengths_of_workload(observe_workload(facts.workload, observation)))
    return without_nodes(facts, lost_nodes).model_copy(update={"workload": workload})


def without_nodes(facts: Facts, lost_nodes: int) -> Facts:
    """Return the facts with fewer nodes. Raises BadInput like `facts_of_run`."""
    cluster = facts.cluster
    if lost_nodes and not isinstance(cluster, Cluster):
        raise BadInput("--lost-nodes: the cluster has nodes of several kinds; describe what is left in --job.")
    if not isinstance(cluster, Cluster):
        return facts
    if not 0 <= lost_nodes < cluster.nodes:
        raise BadInput(f"--lost-nodes {lost_nodes} leaves none of {cluster.nodes} nodes; use a smaller number.")
    return facts.model_copy(update={"cluster": cluster.model_copy(update={"nodes": cluster.nodes - lost_nodes})})


def with_run_records(plan: Plan, model: PacedCostModel, table: Table | None = None) -> Plan:
    """Return the plan with the pace of each stage, and the digests of its observed lengths (`facts_of_run`) and
    table."""
    origins = {"trace": lengths_of_workload(plan.facts.workload), **({"profile": table} if table else {})}
    return plan.model_copy(
        update={
            "digests": {**plan.digests, **{name: digest(one) for name, one in origins.items()}},
            "placements": tuple(
                one.model_copy(update={"pace": model.pace(one.stage, one.layout)}) for one in plan.placements
            ),
        }
    )


def paced_model(plan: Plan, model: CostModel) -> CostModel:
    """The cost model scaled by the paces that the plan records."""
    paces = {placement.stage: placement.pace for placement in plan.placements if placement.pace != 1}
    return PacedCostModel(model, paces) if paces else model


def replan(
    plan: Plan,
    facts: Facts,
    model: CostModel,
    *,
    pins: Sequence[Pin] = (),
    limits: Limits | None = None,
    progress: ProgressCallback | None = None,
) -> Replanned:
    """Find the best plan for changed facts.

    The old plan and the choices in its neighbourhood are tried first. With limits, or if none of these fits, a full
    search follows, which starts from the best of them if there is one. Raises BadInput if no plan fits.
    """
    kept = re_evaluated_or_violation(plan, facts, model, pins)
    is_kept = isinstance(kept, Plan)
    candidates = [one for one in (kept, best_plan_nearby(plan, facts, model, Limits(), pins)) if isinstance(one, Plan)]
    best = min(candidates, key=lambda one: one.period_seconds, default=None)
    if limits is not None or best is None:
        searched = best_plan(facts, model, pins=pins, limits=limits, progress=progress, start=best)
        if not isinstance(searched, Plan):
            raise BadInput("no plan fits what is left; `meshwright plan` says what would help.")
        best = searched
    old_plan_seconds = kept.period_seconds if isinstance(kept, Plan) else None
    moving = tuple(one for one in _moves(plan, best, model) if one.num_bytes)
    seconds = math.fsum(one.seconds for one in moving)
    saved = math.inf if old_plan_seconds is None else old_plan_seconds - best.period_seconds
    return Replanned(
        plan=best,
        old_plan_seconds=old_plan_seconds,
        reason_not_kept="" if is_kept else str(kept),
        moving=moving,
        break_even_steps=math.ceil(seconds / saved) if saved > 0 else None,
    )


def _moves(old: Plan, new: Plan, model: CostModel) -> Iterator[Moving]:
    """The moves to the new plan: weights of each copy that no refit updates, optimizer state of trained copies, and
    sequences in flight."""
    for placement in new.placements:
        stage = new.stage(placement.stage)
        if stage.needs_refit or new.copy_of(stage.name) != stage.name or _is_unmoved(old, new, stage.name):
            continue
        move = _move_to(old, new, placement)
        term = next((t for t in placement.resident.terms if t.name == WEIGHTS), Term(WEIGHTS, 0.0))
        replicas = placement.layout.dp * placement.layout.cp
        weights = term.amount * placement.layout.num_ranks / replicas
        yield Moving(what=f"{stage.role} weights", num_bytes=weights, seconds=model.refit_seconds(move).total)
        if stage.is_trained:
            state = math.fsum(
                t.amount for t in (*placement.resident.terms, *placement.host.terms) if t.name in _OPTIMIZER_TERMS
            )
            yield Moving(
                what=f"{stage.role} optimizer",
                num_bytes=state * placement.layout.num_ranks,
                seconds=model.transfer_seconds(state).total,
            )
    if not _is_unmoved(old, new, GENERATE):
        num_bytes = _bytes_in_flight(old)
        num_replicas = old.placement(GENERATE).layout.dp
        seconds = model.transfer_seconds(num_bytes / num_replicas).total if num_bytes else 0.0
        yield Moving(what="sequences in flight", num_bytes=num_bytes, seconds=seconds)


def _is_unmoved(old: Plan, new: Plan, stage: str) -> bool:
    """True if a stage has the same ranks and layout in both plans."""
    one, other = old.placement(stage), new.placement(stage)
    return one.layout == other.layout and old.pool_of(stage).ranks == new.pool_of(stage).ranks


def _move_to(old: Plan, new: Plan, placement: Placement) -> RefitQuery:
    """The move of a stage's weights from its placement in the old plan to that in the new one."""
    stage = placement.stage
    common = set(old.pool_of(stage).ranks) & set(new.pool_of(stage).ranks)
    return RefitQuery(
        # without an adapter, so that all weights are moved
        model=replace(new.facts.models.spec(new.stage(stage).role), adapter=None),
        source=old.placement(stage).layout,
        target=placement.layout,
        overlap=len(common),
        target_part=new.part_of(stage),
        generates=new.stage(stage).generates,
    )


def _bytes_in_flight(plan: Plan) -> float:
    """Bytes of the sequences in flight at the end of a step, estimated from the transfers of finished ones."""
    schedule, batch_size = plan.placement(GENERATE).schedule, plan.facts.workload.batch_size
    sequences = (schedule.batches_in_flight - 1) * batch_size + schedule.overcommit
    transferred_bytes = max((edge.bytes for edge in plan.edges if edge.producer == GENERATE), default=0.0)
    return transferred_bytes / batch_size * sequences


RECENT_STEPS = 20
"""Number of the most recent steps that are observed; earlier ones may be out of date."""


@dataclass(frozen=True, kw_only=True)
class ObservedRun:
    """The facts of a plan as its run observed them, and the measured / predicted ratio of each stage: `factors` for its
    current layout, and `layout_factors` for every layout that the run has used.

    `relative_error` is the relative error of the period that the plan predicted, against a prediction with these
    factors for the same lengths; 0 for the first plan of a run, which was made before any factor was known.
    """

    facts: Facts
    factors: Mapping[str, float]
    layout_factors: Mapping[tuple[str, Layout], float]
    relative_error: float
    table: Table | None

    def cost_model_for(self, facts: Facts) -> PacedCostModel:
        """The cost model of any facts, scaled by these factors."""
        return PacedCostModel(cost_model_of(facts, self.table), self.factors, self.layout_factors)

    @property
    def model(self) -> PacedCostModel:
        """The cost model of the observed facts, scaled by these factors."""
        return self.cost_model_for(self.facts)


def observed_run(
    plan: Plan, directory: Path, table: Table | None = None, *, facts: Facts | None = None, lost_nodes: int = 0
) -> ObservedRun:
    """Return the observations of the plan's run, applied to the plan's facts or to `facts`.

    `table` is the one that the plan was made with, if any. Raises BadInput for a directory of another plan, for a run
    that is too short, and like `facts_of_run`.
    """
    if read_run_plan(directory) != plan:
        raise BadInput(f"{directory} is a run of another plan; give the plan.json in that directory.")
    spans, earlier_plans = _last_steps(directory / "trace.jsonl"), tuple(_earlier_plans(directory, table))
    observed_facts, factors = (
        facts_of_run(plan, facts or plan.facts, spans, lost_nodes=lost_nodes),
        _factors(plan, spans, table),
    )
    in_layouts: dict[tuple[str, Layout], float] = {}
    for one, plan_factors in (*earlier_plans, (plan, factors)):
        in_layouts |= {(p.stage, p.layout): plan_factors[p.stage] for p in one.placements if p.stage in plan_factors}
    predicted_again = re_evaluate(
        plan, plan.facts, PacedCostModel(cost_model_of(plan.facts, table), factors)
    ).period_seconds
    relative_error = abs(predicted_again - plan.period_seconds) / predicted_again if earlier_plans else 0.0
    return ObservedRun(
        facts=observed_facts, factors=factors, layout_factors=in_layouts, relative_error=relative_error, table=table
    )


def replan_from_run(
    plan: Plan,
    directory: Path,
    table: Table | None = None,
    *,
    facts: Facts | None = None,
    lost_nodes: int = 0,
    limits: Limits | None = None,
) -> Replanned:
    """Find the best plan from the observations of the plan's run. Raises BadInput like `observed_run` and `replan`."""
    return _replanned(plan, observed_run(plan, directory, table, facts=facts, lost_nodes=lost_nodes), limits)


def replan_and_simulate(plan: Plan, directory: Path, table: Table | None = None) -> Replanned:
    """Re-plan like `replan_from_run`; if the new plan is predicted to be faster, both plans are also simulated with the
    same sampled lengths. Raises BadInput like `replan_from_run`."""
    observed = observed_run(plan, directory, table)
    replanned = _replanned(plan, observed, None)
    if replanned.old_plan_seconds is None or replanned.payback_steps_with_pause(0.0) is None:
        return replanned
    kept, new = (
        simulate(one, Sampled(one, observed.cost_model_for, seed=0), steps=RECENT_STEPS).steps.mean
        for one in (re_evaluate(plan, observed.facts, observed.model), replanned.plan)
    )
    return replace(replanned, simulated=Simulated(old_plan_seconds=kept, seconds=new))


def _replanned(plan: Plan, observed: ObservedRun, limits: Limits | None) -> Replanned:
    model = observed.model
    replanned = replan(plan, observed.facts, model, pins=parse_pins(plan.pins, plan.graph), limits=limits)
    return replace(
        replanned, plan=with_run_records(replanned.plan, model, observed.table), relative_error=observed.relative_error
    )


def _last_steps(trace: Path) -> tuple[Span, ...]:
    """The spans of the observed steps and of one step before them; an observation leaves out its first step."""
    return read_last_spans(trace, RECENT_STEPS + 1)


def _factors(plan: Plan, spans: tuple[Span, ...], table: Table | None) -> dict[str, float]:
    return pace_factors(calibrate(plan, spans, table, date=datetime.date.today().isoformat()))


def _earlier_plans(directory: Path, table: Table | None) -> Iterator[tuple[Plan, dict[str, float]]]:
    """Each earlier plan of the run with its factors, except plans that ran too few steps to determine them."""
    for former in former_plans(directory):
        plan = read_plan(former.plan)
        try:
            factors = _factors(plan, _last_steps(former.trace), table)
        except BadInput:
            continue
        yield plan, factors
