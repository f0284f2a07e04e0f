"""Comparison of two plans: the differences of their facts, stages, cost terms and memory, each by its own costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.cost_models.cost import Term
from meshwright.planner.analysis.plan_summary import memory_parts
from meshwright.planner.analysis.whatif import PlanMetrics, plan_metrics
from meshwright.planner.plan.pins import Ranks
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.documents import Difference, differences
from meshwright.profiles.html_tables import html_paragraphs, html_table
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class StagePlacement:
    """The pool, layout, schedule and seconds of a stage."""

    pool: Ranks
    layout: Layout
    schedule: Schedule
    steps_ahead: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TermChange:
    """A term of a stage's cost in both plans, in seconds; 0 for a plan without it."""

    name: str
    one: float
    other: float

    @property
    def difference(self) -> float:
        return self.other - self.one


@dataclass(frozen=True, kw_only=True)
class StageComparison:
    """A stage in both plans; None for a plan without it. `terms` are the terms of its cost that differ, those that
    differ most first."""

    stage: str
    one: StagePlacement | None
    other: StagePlacement | None
    terms: tuple[TermChange, ...] = ()

    @property
    def is_placed_alike(self) -> bool:
        """True if both plans make the same choices for the stage."""
        return _choice(self.one) == _choice(self.other)

    @property
    def sentence(self) -> str | None:
        """A report line on the choice, the seconds and the term that differs most; None if nothing differs."""
        if self.one is None or self.other is None:
            return f"{self.stage} is only in the {'second' if self.one is None else 'first'} plan."
        if self.is_placed_alike and not self.terms:
            return None
        change = self.other.seconds - self.one.seconds
        mostly = next((term for term in self.terms if term.difference * change > 0), None)
        because = f", mostly {mostly.name} {mostly.difference:+.3f} s" if mostly else ""
        return f"{self.stage}: {_change_of_choice(self.one, self.other)}, {change:+.3f} s{because}."


@dataclass(frozen=True, kw_only=True)
class MemoryChange:
    """Bytes that a stage needs for one purpose on the fullest rank of each plan; 0 for a plan that has none.

    `stays` is False if it needs them only while it runs.
    """

    stage: str
    what: str
    stays: bool
    one_bytes: float
    other_bytes: float


@dataclass(frozen=True, kw_only=True)
class PlanComparison:
    """The comparison of two plans.

    It has the key numbers of each, their differences (`other` minus `one`), the stages side by side, the parts of the
    fullest ranks' memory that differ, those that differ most first, and the keys in which the facts of the two jobs
    differ. `one_refit_seconds` and `other_refit_seconds` are the sums of the weight synchronisations.
    """

    one: PlanMetrics
    other: PlanMetrics
    difference: PlanMetrics
    stages: tuple[StageComparison, ...]
    facts: tuple[Difference, ...]
    notes: tuple[str, ...]
    memory: tuple[MemoryChange, ...] = ()
    one_refit_seconds: float = 0.0
    other_refit_seconds: float = 0.0

    def _repr_html_(self) -> str:
        """The comparison in a notebook: the key numbers of both plans, their stages, and why the steps differ."""
        numbers = (
            ("step s", f"{self.one.step_seconds:.3f}", f"{self.other.step_seconds:.3f}"),
            ("response tokens/s", f"{self.one.tokens_per_second:,.0f}", f"{self.other.tokens_per_second:,.0f}"),
            ("GPU-hours of 1000 steps", f"{self.one.gpu_hours:,.1f}", f"{self.other.gpu_hours:,.1f}"),
        )
        stages = ((row.stage, *(_html_cell(placed) for placed in (row.one, row.other))) for row in self.stages)
        headings = ("", "one", "other")
        return html_table(headings, (*numbers, *stages)) + html_paragraphs((*self.sentences, *self.notes))

    @property
    def sentences(self) -> tuple[str, ...]:
        """Why the steps differ: the stages whose choice or cost differs, and the weight synchronisations."""
        return tuple(self._sentences())

    def _sentences(self) -> Iterator[str]:
        yield from (sentence for stage in self.stages if (sentence := stage.sentence))
        change = self.other_refit_seconds - self.one_refit_seconds
        if abs(change) >= _MIN_SECONDS:
            yield f"The weight synchronisations take {change:+.3f} s."


def compare_plans(one: Plan, other: Plan) -> PlanComparison:
    """Compare two plans; stages are in the order of the first plan, followed by those of the second only."""
    one_outlook, other_outlook = plan_metrics(one), plan_metrics(other)
    names = dict.fromkeys(placement.stage for plan in (one, other) for placement in plan.placements)
    return PlanComparison(
        one=one_outlook,
        other=other_outlook,
        difference=other_outlook.minus(one_outlook),
        stages=tuple(_stage(one, other, name) for name in names),
        facts=differences(one.facts, other.facts),
        notes=tuple(_notes(one, other)),
        memory=_memory(one, other),
        one_refit_seconds=sum(refit.cost.total for refit in one.refits),
        other_refit_seconds=sum(refit.cost.total for refit in other.refits),
    )


def _html_cell(placed: StagePlacement | None) -> str:
    return f"{placed.layout} on {placed.pool.range_text}, {placed.seconds:.3f} s" if placed else ""


_MIN_SECONDS = 0.0005
"""The smallest difference of a time that is reported; a smaller one is printed as 0."""


def _choice(placed: StagePlacement | None) -> object:
    """All choices of a placement, without its seconds."""
    return placed and (placed.pool, placed.layout, placed.schedule, placed.steps_ahead)


def _change_of_choice(one: StagePlacement, other: StagePlacement) -> str:
    if one.layout != other.layout:
        return f"{other.layout} instead of {one.layout}"
    if one.pool != other.pool:
        return f"{other.layout} on ranks {other.pool.range_text} instead of {one.pool.range_text}"
    if one.steps_ahead != other.steps_ahead:
        return f"{other.layout}, ahead by {other.steps_ahead} steps instead of {one.steps_ahead}"
    return f"{other.layout} with another schedule" if one.schedule != other.schedule else "the same choice"


def _stage(one: Plan, other: Plan, stage: str) -> StageComparison:
    return StageComparison(
        stage=stage,
        one=_placed(one, stage),
        other=_placed(other, stage),
        terms=_terms(_terms_of(one, stage), _terms_of(other, stage)),
    )


def _terms_of(plan: Plan, stage: str) -> tuple[Term, ...]:
    placed = next((placement for placement in plan.placements if placement.stage == stage), None)
    return placed.cost.merged().terms if placed else ()


def _terms(one: Sequence[Term], other: Sequence[Term]) -> tuple[TermChange, ...]:
    """The terms that differ by a printed amount, those that differ most first."""
    before, after = ({term.name: term.amount for term in terms} for terms in (one, other))
    changes = (
        TermChange(name=name, one=before.get(name, 0.0), other=after.get(name, 0.0))
        for name in dict.fromkeys([*before, *after])
    )
    differing = (change for change in changes if abs(change.difference) >= _MIN_SECONDS)
    return tuple(sorted(differing, key=lambda change: -abs(change.difference)))


def _memory(one: Plan, other: Plan) -> tuple[MemoryChange, ...]:
    before, after = (
        {(part.stage, part.what, part.stays): part.num_bytes for part in memory_parts(plan)} for plan in (one, other)
    )
    changes = [
        MemoryChange(
            stage=key[0], what=key[1], stays=key[2], one_bytes=before.get(key, 0.0), other_bytes=after.get(key, 0.0)
        )
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
    ]
    return tuple(sorted(changes, key=lambda change: -abs(change.other_bytes - change.one_bytes)))


def _placed(plan: Plan, stage: str) -> StagePlacement | None:
    placement_of_stage = next((placement for placement in plan.placements if placement.stage == stage), None)
    if placement_of_stage is None:
        return None
    pool = plan.pool(placement_of_stage.pool)
    return StagePlacement(
        pool=Ranks(pool.first_rank, pool.num_ranks),
        layout=placement_of_stage.layout,
        schedule=placement_of_stage.schedule,
        steps_ahead=placement_of_stage.steps_ahead,
        seconds=placement_of_stage.cost.total,
    )


def _notes(one: Plan, other: Plan) -> Iterator[str]:
    if one.digests.get("profile") != other.digests.get("profile"):
        yield "the plans were made with different tables, or one without: part of the difference comes from the costs."
    for name, plan in (("first", one), ("second", other)):
        if plan.solver.gap > _WIDE_GAP:
            yield f"the {name} plan is proven to be within {plan.solver.gap:.0%} of the best, not closer."


_WIDE_GAP = 0.1
"""A gap above this may exceed the difference of two plans."""
