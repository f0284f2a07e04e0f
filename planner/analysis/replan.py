"""A plan made anew in the middle of a run: which is best from here, what moving to it costs, and when that is earned.

    facts      = those of the plan, with the lengths that the run met and without the nodes that were lost
    seconds    = those of the cost model, times what each stage took in the run over what was predicted at its lengths
    moving     = the weights of every copy that no refit brings, the optimizer's state, and the sequences in flight
    earned     = moving / (seconds of a step as things are - those of the new plan), in steps

Ranks are numbered anew when nodes are lost. State that was lost with them comes from a replica or a checkpoint, over
links that are as fast; how long processes take to start is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.cost_models.cost import WEIGHTS, Cost, Term
from meshwright.cost_models.question import Call, CostModel, LayoutCosts, Move, PassedOn, Summed
from meshwright.planner.analysis.correct_table import Calibration
from meshwright.planner.compile import best_plan
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import Pin
from meshwright.planner.plan.plan import Placement, Plan
from meshwright.planner.search.near import near_plan
from meshwright.planner.search.progress import Progress
from meshwright.planner.search.start import start_from
from meshwright.planner.solver.result import Limits
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.documents import digest
from meshwright.profiles.environment.seen_lengths import as_seen, with_lengths
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.observations import met, observe
from meshwright.profiles.stages import GENERATE, Stage
from meshwright.profiles.table import Table
from meshwright.profiles.trace import Span

_STATE = ("main weights", "moments")
"""The terms of the bytes that a training stage's optimizer keeps."""


@dataclass(frozen=True, kw_only=True)
class Moving:
    """What goes from rank to rank before the first step of another plan: bytes in all, and seconds."""

    what: str
    num_bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Mean seconds of a step with lengths that are drawn, under the plan as it was and under the new one. SIMULATED."""

    kept_seconds: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Replanned:
    """`kept_seconds` is a step as things are now under the plan as it was, None where that cannot go on: see `broken`.
    `earned_after_steps` is None where moving earns nothing, and 0 where there is no choice. `off_by` is how far the one
    before was off, in parts of a step, where it was made in the same way as this one."""

    plan: Plan
    kept_seconds: float | None
    broken: str
    moving: tuple[Moving, ...]
    earned_after_steps: int | None
    off_by: float = 0.0
    simulated: Simulated | None = None

    @property
    def moving_seconds(self) -> float:
        return math.fsum(one.seconds for one in self.moving)

    def earned_after(self, pause_seconds: float) -> int | None:
        """In how many steps moving is earned back, with a pause for it, by what is predicted or simulated to be saved,
        whichever is less; None where the plan is no faster than the one before by more than a search leaves open, and
        by more than what the one before was off by."""
        if self.kept_seconds is None:
            return 0
        saved, usual = self.kept_seconds - self.plan.period_seconds, Limits().on(self.plan.facts.cluster.num_ranks)
        if self.simulated:
            saved = min(saved, self.simulated.kept_seconds - self.simulated.seconds)
        if saved <= self.kept_seconds * max(usual.tolerance, self.off_by):
            return None
        return math.ceil((self.moving_seconds + pause_seconds) / saved)


@dataclass(frozen=True)
class Paced(PassedOn):
    """A cost model whose stages take as many times longer as a run has shown: in each layout that the run has had as
    there, `in_layouts`, and in any other as in the layout that they have now."""

    factors: Mapping[str, float]
    in_layouts: Mapping[tuple[str, Layout], float] = field(default_factory=dict)

    def least_seconds(self, stage: Stage, model: ModelSpec, num_ranks: int, part: int) -> float:
        return super().least_seconds(stage, model, num_ranks, part) * self._least_factor(stage)

    def least_generation_seconds(self, call: Call) -> float:
        return super().least_generation_seconds(call) * self._factor(call)

    def seconds(self, call: Call) -> Cost:
        cost, factor = super().seconds(call), self._factor(call)
        return Cost(tuple(Term(t.name, t.amount * factor, t.source) for t in cost.terms)) if factor != 1 else cost

    def on_layout(self, call: Call) -> LayoutCosts:
        return Summed(self, call)

    def tail_seconds(self, call: Call) -> float:
        return super().tail_seconds(call) * self._factor(call)

    def pace(self, stage: str, layout: Layout) -> float:
        """How many times longer a stage takes in a layout."""
        here = self.in_layouts.get((stage, layout))
        return self.factors.get(stage, 1.0) if here is None else here

    def _factor(self, call: Call) -> float:
        return self.pace(call.stage.name, call.layout)

    def _least_factor(self, stage: Stage) -> float:
        there = (factor for (name, _), factor in self.in_layouts.items() if name == stage.name)
        return min(self.factors.get(stage.name, 1.0), *there, math.inf)


def factors_of(found: Calibration) -> dict[str, float]:
    """How many times longer each stage took in a run than was predicted at its lengths."""
    return {row.stage: row.measured_seconds / row.before_seconds for row in found.rows if row.before_seconds}


def facts_from(plan: Plan, facts: Facts, spans: Sequence[Span], *, lost_nodes: int = 0) -> Facts:
    """The facts of a job as a run of the plan has met them, without the nodes that were lost.

    Raises BadInput for a trace that is no use, for more nodes than there are, and where nodes are of several kinds.
    """
    layouts = {placement.stage: placement.layout for placement in plan.placements}
    seen = observe(spans, layouts, plan.graph, plan.facts.workload.batch_size)
    workload = with_lengths(facts.workload, as_seen(met(facts.workload, seen)))
    return without_nodes(facts, lost_nodes).model_copy(update={"workload": workload})


def without_nodes(facts: Facts, lost_nodes: int) -> Facts:
    """The facts with so many nodes fewer. Raises BadInput as `facts_from`."""
    cluster = facts.cluster
    if lost_nodes and not isinstance(cluster, Cluster):
        raise BadInput("--lost-nodes: the cluster has nodes of several kinds; describe what is left in --job.")
    if not isinstance(cluster, Cluster):
        return facts
    if not 0 <= lost_nodes < cluster.nodes:
        raise BadInput(f"--lost-nodes {lost_nodes} leaves no node of {cluster.nodes}; lose fewer.")
    return facts.model_copy(update={"cluster": cluster.model_copy(update={"nodes": cluster.nodes - lost_nodes})})


def of_run(plan: Plan, model: Paced, table: Table | None = None) -> Plan:
    """The plan, which says that its lengths are not what the job expects: they are those of `facts_from`; the pace of
    each stage, and the table that it was made with."""
    told = {"trace": as_seen(plan.facts.workload), **({"profile": table} if table else {})}
    return plan.model_copy(
        update={
            "digests": {**plan.digests, **{name: digest(one) for name, one in told.items()}},
            "placements": tuple(
                one.model_copy(update={"pace": model.pace(one.stage, one.layout)}) for one in plan.placements
            ),
        }
    )


def as_paced(plan: Plan, model: CostModel) -> CostModel:
    """The model, with the stages of the plan as slow as it says that a run has shown them."""
    paces = {placement.stage: placement.pace for placement in plan.placements if placement.pace != 1}
    return Paced(model, paces) if paces else model


def replan(
    plan: Plan,
    facts: Facts,
    model: CostModel,
    *,
    pins: Sequence[Pin] = (),
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Replanned:
    """What is best from here for facts that have changed: at once among choices near those of the plan, or with limits
    by a search that starts there. Raises BadInput where no plan fits."""
    kept = start_from(plan, facts, model, pins)
    is_kept = isinstance(kept, Plan)
    found = [one for one in (kept, near_plan(plan, facts, model, Limits(), pins)) if isinstance(one, Plan)]
    best = min(found, key=lambda one: one.period_seconds, default=None)
    if limits is not None or best is None:
        searched = best_plan(facts, model, pins=pins, limits=limits, progress=progress, start=best)
        if not isinstance(searched, Plan):
            raise BadInput("no plan fits what is left; ask `meshwright plan` for what would help.")
        best = searched
    kept_seconds = kept.period_seconds if isinstance(kept, Plan) else None
    moving = tuple(one for one in _moving(plan, best, model) if one.num_bytes)
    seconds = math.fsum(one.seconds for one in moving)
    saved = math.inf if kept_seconds is None else kept_seconds - best.period_seconds
    return Replanned(
        plan=best,
        kept_seconds=kept_seconds,
        broken="" if is_kept else str(kept),
        moving=moving,
        earned_after_steps=math.ceil(seconds / saved) if saved > 0 else None,
    )


def _moving(old: Plan, new: Plan, model: CostModel) -> Iterator[Moving]:
    """Of each copy that no refit brings its weights, of trained ones the optimizer too; sequences in flight."""
    for placement in new.placements:
        stage = new.stage(placement.stage)
        if stage.is_refit or new.copy_of(stage.name) != stage.name or _stays(old, new, stage.name):
            continue
        move = _move_of(old, new, placement)
        term = next((t for t in placement.resident.terms if t.name == WEIGHTS), Term(WEIGHTS, 0.0))
        replicas = placement.layout.dp * placement.layout.cp
        weights = term.amount * placement.layout.num_ranks / replicas
        yield Moving(what=f"{stage.role} weights", num_bytes=weights, seconds=model.move_seconds(move).total)
        if stage.is_trained:
            state = math.fsum(t.amount for t in (*placement.resident.terms, *placement.host.terms) if t.name in _STATE)
            yield Moving(
                what=f"{stage.role} optimizer",
                num_bytes=state * placement.layout.num_ranks,
                seconds=model.handover_seconds(state).total,
            )
    if not _stays(old, new, GENERATE):
        num_bytes = _bytes_in_flight(old)
        ranks = old.placement(GENERATE).layout.dp
        seconds = model.handover_seconds(num_bytes / ranks).total if num_bytes else 0.0
        yield Moving(what="sequences in flight", num_bytes=num_bytes, seconds=seconds)


def _stays(old: Plan, new: Plan, stage: str) -> bool:
    """Whether a stage keeps its ranks and its layout."""
    one, other = old.placement(stage), new.placement(stage)
    return one.layout == other.layout and old.pool_of(stage).ranks == new.pool_of(stage).ranks


def _move_of(old: Plan, new: Plan, placement: Placement) -> Move:
    """A stage's weights from where the old plan has them to where the new one does."""
    stage = placement.stage
    common = set(old.pool_of(stage).ranks) & set(new.pool_of(stage).ranks)
    return Move(
        model=replace(new.facts.models.spec(new.stage(stage).role), adapter=None),  # all weights, not the trained ones
        source=old.placement(stage).layout,
        target=placement.layout,
        overlap=len(common),
        target_part=new.part_of(stage),
        generates=new.stage(stage).generates,
    )


def _bytes_in_flight(plan: Plan) -> float:
    """Of the sequences that are begun and belong to no batch that is delivered, as they are handed over."""
    schedule, batch_size = plan.placement(GENERATE).schedule, plan.facts.workload.batch_size
    sequences = (schedule.batches_in_flight - 1) * batch_size + schedule.overcommit
    handed = max((edge.bytes for edge in plan.edges if edge.producer == GENERATE), default=0.0)
    return handed / batch_size * sequences
