"""What the page shows of an answer, drawn by the charts and templates of the report; no cost is computed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from jinja2 import ChoiceLoader, PackageLoader
from markupsafe import Markup

from meshwright.planner.analysis.plan_comparison import MemoryChange, StageComparison
from meshwright.planner.analysis.plan_summary import NextLayout, run_cost
from meshwright.planner.analysis.predicted_ranges import predicted_ranges
from meshwright.planner.analysis.sweep import SweepPoint, SweptPlan
from meshwright.planner.analysis.whatif import plan_metrics
from meshwright.planner.plan.evaluate import free_bytes
from meshwright.planner.plan.plan import Plan
from meshwright.planner.report import formatting
from meshwright.planner.report.rendering import ENVIRONMENT
from meshwright.planner.report.resource_sections import memory, terms
from meshwright.planner.report.timelines import overview, period_chart, period_timeline
from meshwright.planner.report.whatif_pages import sweep_plots
from meshwright.planner.search.no_plan import NoPlan
from meshwright.planner.search.search_control import SearchProgress
from meshwright.profiles.lengths import Histogram
from meshwright.profiles.uncertainty import Interval
from meshwright.runtime.api.analyses import compare
from meshwright.runtime.explorer.controls import controls_of, grid_fields_of, other_settings
from meshwright.runtime.explorer.grids import setting_of_point, sweep_of_grid
from meshwright.runtime.explorer.searches import Answer, Refusal, RunningSearch
from meshwright.runtime.explorer.source import Source
from meshwright.runtime.explorer.state import State

_ENVIRONMENT = ENVIRONMENT.overlay(
    loader=ChoiceLoader([PackageLoader("meshwright.runtime.explorer"), PackageLoader("meshwright.planner.report")])
)
_NUM_BARS = 32
"""Number of bars in the picture of a distribution of lengths."""


def page(source: Source, state: State) -> str:
    """The text of the page, with its controls set to a state."""
    cluster, workload = source.facts.cluster.name.replace(" x ", " × "), source.facts.workload
    return _ENVIRONMENT.get_template("explore.html").render(
        title=f"Explore {source.path.name}",
        lead=f"{cluster}, {workload.batch_size:,} sequences a step",
        content=(),
        controls=controls_of(source.facts, state),
        others=other_settings(source.facts, state),
        state=state,
        stages=source.facts.graph.names,
        grid_fields=grid_fields_of(source.facts, state),
    )


def script() -> str:
    """The text of the script of the page."""
    return _ENVIRONMENT.get_template("explore.js").render()


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A quantity of the plan with its range, the same of the plan beside it, and the difference."""

    name: str
    here: str
    range: str
    beside: str = ""
    difference: str = ""


@dataclass(frozen=True)
class Beside:
    """What an answer is shown with: the answer to the state beside it, the next best layouts, and what the pins cost.

    The answer and the layouts are None until they are known.
    """

    reference: Answer | None
    layouts: tuple[NextLayout, ...] | None
    reasons: tuple[str, ...]


def answer_page(source: Source, state: State, answer: Answer, beside: Beside) -> Markup:
    """The markup of an answer."""
    reference = state.reference
    is_beside = reference.searched != state.searched
    values = {
        "state": state,
        "query": state.query,
        "command": state.command(source.path, source.options),
        "comparison": _comparison_commands(source, state) if is_beside else (),
        "can_save_job": source.job is not None,
        "reasons": beside.reasons,
        "stopped": answer.stopped,
        "seconds": answer.seconds,
    }
    outcome = answer.outcome
    if isinstance(outcome, Refusal):
        return _render("refused.html", sentences=(outcome.sentence,), changes=(), **values)
    if isinstance(outcome, NoPlan):
        heading = "no plan fits" if outcome.status == "infeasible" else "no plan was found in time"
        sentences = (f"{heading}.", *(limit.sentence for limit in outcome.limits))
        changes = tuple(change.sentence for change in outcome.changes)
        return _render("refused.html", sentences=sentences, changes=changes, **values)
    other = beside.reference if is_beside else None
    workload = outcome.facts.workload
    return _render(
        "answer.html",
        rows=_rows(_quantities(state, answer), _quantities(reference, other) if other else {}),
        beside_label=reference.label,
        compared=_compared(reference, other, outcome) if other else None,
        gap=_gap(outcome),
        sections=(overview(outcome), period_timeline(outcome), memory(outcome), terms(outcome)),
        lengths=[
            (what, f"mean {lengths.mean:,.0f}, longest {lengths.maximum:,} tokens", _bars(lengths))
            for what, lengths in (("prompts", workload.prompt_lengths), ("responses", workload.response_lengths))
        ],
        layouts=None if beside.layouts is None else [_layout_row(one) for one in beside.layouts],
        **values,
    )


def _comparison_commands(source: Source, state: State) -> tuple[str, ...]:
    """The command lines that write the plan of the state beside this one, and compare the two."""
    return (
        state.reference.command(source.path, source.options, "kept.json"),
        "meshwright compare kept.json plan.json",
    )


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """Two plans side by side: why their steps differ, their periods over one axis, their stages and their memory; or
    why there is only one."""

    missing: str = ""
    sentences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    charts: tuple[tuple[str, Markup], ...] = ()
    stages: tuple[tuple[str, ...], ...] = ()
    memory: tuple[tuple[str, ...], ...] = ()


_MAX_PARTS = 8
"""Largest number of rows in the table of memory that differs."""


def _compared(reference: State, answer: Answer, plan: Plan) -> _Compared:
    other = answer.outcome
    if isinstance(other, Refusal):
        return _Compared(missing=other.sentence)
    if isinstance(other, NoPlan):
        return _Compared(missing=" ".join(("no plan fits.", *(limit.sentence for limit in other.limits))))
    comparison = compare(other, plan)
    change = comparison.difference.step_seconds
    step = (
        f"A step takes {plan.period_seconds:.3f} s instead of {other.period_seconds:.3f} s "
        f"({change:+.3f} s, {change / other.period_seconds:+.1%})."
    )
    longest = max(plan.period_seconds, other.period_seconds)
    return _Compared(
        sentences=(step, *comparison.sentences),
        notes=comparison.notes,
        charts=tuple((label, period_chart(one, longest)) for label, one in ((reference.label, other), ("here", plan))),
        stages=tuple(_stage_row(stage) for stage in comparison.stages),
        memory=tuple(map(_memory_row, comparison.memory[:_MAX_PARTS])),
    )


def _stage_row(row: StageComparison) -> tuple[str, ...]:
    """A stage: both layouts with their ranks, both times and their difference, and the terms that differ most."""
    before, after = (
        f"{placed.layout} on {placed.pool.range_text}, {formatting.schedule(placed.schedule)}" if placed else ""
        for placed in (row.one, row.other)
    )
    change = f"{row.other.seconds - row.one.seconds:+.3f}" if row.one and row.other else ""
    return (
        row.stage,
        before,
        "the same" if row.is_placed_alike else after,
        *(f"{placed.seconds:.3f}" if placed else "" for placed in (row.one, row.other)),
        change,
        ", ".join(f"{term.name} {term.difference:+.3f} s" for term in row.terms[:_MAX_TERMS]),
    )


_MAX_TERMS = 3
"""Largest number of terms that are listed for a stage."""


def _memory_row(part: MemoryChange) -> tuple[str, ...]:
    change = part.other_bytes - part.one_bytes
    return (
        part.stage,
        part.what,
        "always" if part.stays else "while it runs",
        formatting.size(part.one_bytes) if part.one_bytes else "-",
        formatting.size(part.other_bytes) if part.other_bytes else "-",
        f"{'+' if change > 0 else ''}{formatting.size(change)}",
    )


def numbers(state: State, answer: Answer) -> dict[str, object] | None:
    """The numbers of an answer as plain data, with the 10th and the 90th percentile of each that is predicted; None for
    an answer without a plan."""
    if not isinstance(answer.outcome, Plan) or answer.step_interval is None:
        return None
    cost = run_cost(answer.outcome, state.price, state.num_steps)
    ranges = predicted_ranges(answer.outcome, answer.step_interval, cost)
    return {
        "step_seconds": answer.outcome.period_seconds,
        "tokens_per_second": plan_metrics(answer.outcome).tokens_per_second,
        "ranks": answer.outcome.facts.cluster.num_ranks,
        "cost": asdict(cost),
        "ranges": {name: interval and interval._asdict() for name, interval in vars(ranges).items()},
    }


def headline(answer: Answer) -> str:
    """The answer in a few words, for the title and the status line."""
    if isinstance(answer.outcome, Plan):
        stopped = ", stopped" if answer.stopped else ""
        return f"{formatting.seconds(answer.outcome.period_seconds)} a step{stopped}"
    return "refused" if isinstance(answer.outcome, Refusal) else "no plan fits"


def _render(template: str, /, **values: object) -> Markup:
    return Markup(_ENVIRONMENT.get_template(template).render(values))


def _rows(quantities: Mapping[str, _Quantity], before: Mapping[str, _Quantity]) -> list[_Row]:
    return [
        _Row(
            name=name,
            here=here.text,
            range=here.range,
            beside=before[name].text if name in before else "",
            difference=here.minus(before[name]) if name in before else "",
        )
        for name, here in quantities.items()
    ]


@dataclass(frozen=True, kw_only=True)
class _Quantity:
    """A number of a plan with its text and its range. Its difference is a share of the other number, or `by` formats
    it."""

    value: float
    text: str
    by: Callable[[float], str] | None = None
    range: str = ""

    def minus(self, other: _Quantity) -> str:
        """The difference as text; empty if the two read the same."""
        if self.text == other.text:
            return ""
        change = self.value - other.value
        if self.by is not None:
            return f"{'+' if change > 0 else '-'}{self.by(abs(change))}"
        return f"{change / other.value:+.1%}" if other.value else ""


def _quantities(state: State, answer: Answer) -> dict[str, _Quantity]:
    """The quantities of a plan by name; none if the answer is no plan."""
    plan, of_step = answer.outcome, answer.step_interval
    if not isinstance(plan, Plan) or of_step is None:
        return {}
    metrics, cost = plan_metrics(plan), run_cost(plan, state.price, state.num_steps)
    ranges = predicted_ranges(plan, of_step, cost)
    of_steps, num_ranks, free = f"{state.num_steps:,} steps", plan.facts.cluster.num_ranks, free_bytes(plan)
    tokens, hours, money = "{:,.0f}".format, "{:,.1f}".format, "{:,.2f}".format
    found = {
        "step": _predicted(plan.period_seconds, ranges.step_seconds, formatting.seconds),
        "response tokens/s": _predicted(metrics.tokens_per_second, ranges.tokens_per_second, tokens),
        "GPUs": _Quantity(value=num_ranks, text=f"{num_ranks:,}", by="{:.0f}".format),
        f"hours of {of_steps}": _predicted(cost.hours, ranges.hours, hours),
        f"GPU-hours of {of_steps}": _predicted(cost.gpu_hours, ranges.gpu_hours, hours),
    }
    if cost.money is not None and ranges.money is not None:
        found[f"money of {of_steps}"] = _predicted(cost.money, ranges.money, money)
    idle = metrics.idle_share
    idle_text = formatting.percent(idle)
    found["idle share of the ranks' time"] = _Quantity(value=idle, text=idle_text, by=formatting.percent)
    found["free memory on the fullest rank"] = _Quantity(value=free, text=formatting.size(free), by=formatting.size)
    found["staleness"] = _Quantity(value=plan.staleness, text=str(plan.staleness), by="{:.0f}".format)
    return found


def _predicted(value: float, percentiles: Interval, text_of: Callable[[float], str]) -> _Quantity:
    return _Quantity(value=value, text=text_of(value), range=formatting.interval(percentiles, text_of))


_SMALLEST_SHOWN_GAP = 0.001
"""The last digit of a gap; smaller ones are rounded up to it."""


def _gap(plan: Plan) -> str:
    solver = plan.solver
    if not solver.gap:
        return "The fastest plan in the space, by this cost model."
    return (
        f"At most {max(solver.gap, _SMALLEST_SHOWN_GAP):.1%} slower than the best plan in the space, by this cost "
        f"model (none is faster than {formatting.seconds(solver.bound_seconds)})."
    )


@dataclass(frozen=True, kw_only=True)
class _LayoutRow:
    """The next best layout of a stage as text, and the pin that tries it; no pin where there is none."""

    stage: str
    layout: str
    instead: str
    step: str
    reason: str
    pin: str


def _layout_row(one: NextLayout) -> _LayoutRow:
    return _LayoutRow(
        stage=one.stage,
        layout=str(one.layout),
        instead="" if one.instead is None else str(one.instead),
        step="" if one.step_seconds is None else f"{one.step_seconds:+.3f}",
        reason=one.reason,
        pin="" if one.instead is None else f"{one.stage}.layout={one.instead}",
    )


@dataclass(frozen=True)
class _Bar:
    """A bar of a picture, in percent of its width and height."""

    x: float
    height: float
    title: str


def _bars(lengths: Histogram) -> list[_Bar]:
    """The shares of the lengths in equal intervals up to the longest."""
    width = lengths.maximum / _NUM_BARS
    shares = [0.0] * _NUM_BARS
    for tokens, share in zip(lengths.tokens, lengths.probabilities, strict=True):
        shares[min(_NUM_BARS - 1, int((tokens - 1) / width))] += share
    largest = max(shares)
    return [
        _Bar(
            100 * index / _NUM_BARS,
            100 * share / largest,
            f"{index * width:,.0f} to {(index + 1) * width:,.0f} tokens: {share:.1%}",
        )
        for index, share in enumerate(shares)
    ]


def searching(progress: SearchProgress | None, estimate: float | None) -> str:
    """The news of a search in a sentence."""
    text = "Searching"
    if progress is not None:
        text += f": {progress.activity}"
        if progress.period_seconds is not None:
            bound = f", none below {formatting.seconds(progress.bound_seconds)}" if progress.bound_seconds else ""
            return f"{text}; best so far {formatting.seconds(progress.period_seconds)} a step{bound}."
    if estimate is not None:
        text += f"; the given placements would take {formatting.seconds(estimate)} a step"
    return f"{text}."


def searching_grid(points: Sequence[Answer | None], running: tuple[State, RunningSearch] | None) -> str:
    """The news of the search of a grid in a sentence."""
    num_first, num_done = (
        sum(point is not None and point.is_first is is_first for point in points) for is_first in (True, False)
    )
    done = f"{num_done} of {len(points)} are planned"
    if num_first:
        done += f", {num_first} of them roughly" if not num_done else f", {num_first} others roughly"
    if running is None:
        return f"{done}."
    state, search = running
    return f"{done}; {state.label}: {searching(search.progress, None)}"


def share(progress: SearchProgress | None) -> float | None:
    """The done share of a search, 0 to 1: costing is its first half; None before it starts."""
    if progress is None or not progress.total:
        return None
    done = progress.done / progress.total
    return done / 2 if progress.phase == "costing" else 0.5 + done / 2


_FIRST_SHARE = 0.25
"""The share of a point's search, roughly, that is done with its first answer."""


def grid_page(source: Source, state: State, answers: Sequence[Answer | None], *, is_stopped: bool) -> Markup:
    """The markup of the points of a state's grid that are answered: two plots and a table; empty without a grid."""
    if not state.grid:
        return Markup("")
    sweep = sweep_of_grid(state, answers)
    settings = [str(setting_of_point(state, point)) for point in state.points]
    states, known = dict(zip(settings, state.points, strict=True)), dict(zip(settings, answers, strict=True))
    return _render(
        "grid.html",
        plots=sweep_plots(sweep),
        rows=[
            _grid_row(point, state, states[str(point.setting)], known[str(point.setting)]) for point in sweep.by_cost
        ],
        headings=_grid_headings(state),
        num_points=len(answers),
        num_missing=sum(answer is None or answer.is_first for answer in answers),
        num_rough=sum(answer is not None and answer.is_first for answer in answers),
        is_stopped=is_stopped or any(answer is not None and answer.stopped for answer in answers),
        command=state.grid_command(source.path, source.options),
        query=state.query,
    )


@dataclass(frozen=True, kw_only=True)
class _GridRow:
    """A point of a grid as text; `violation` says why it has no plan, and `query` is the address that opens it."""

    label: str
    cells: tuple[str, ...] = ()
    violation: str = ""
    query: str


def _grid_headings(state: State) -> tuple[str, ...]:
    of_steps = f"of {state.num_steps:,} steps"
    money = () if state.price is None else (f"money {of_steps}",)
    return ("GPUs", "step", "8 of 10 within", f"GPU-hours {of_steps}", *money)


def _grid_row(point: SweepPoint, state: State, at: State, answer: Answer | None) -> _GridRow:
    label, query = (
        formatting.setting(point.setting),
        replace(at, compared_with=state.compared_with, grid=state.grid).query,
    )
    if point.plan is None:
        return _GridRow(label=label, violation=" ".join(point.violations), query=query)
    plan = point.plan
    money = () if plan.cost.money is None else (f"{plan.cost.money:,.2f}",)
    return _GridRow(
        label=label,
        cells=(
            f"{plan.num_ranks:,}",
            formatting.seconds(plan.step_seconds),
            formatting.interval(plan.ranges.step_seconds, formatting.seconds),
            f"{plan.cost.gpu_hours:,.1f}",
            *money,
            ", ".join(_grid_notes(plan, answer)),
        ),
        query=query,
    )


def _grid_notes(plan: SweptPlan, answer: Answer | None) -> Iterator[str]:
    """Notes on the plan of a point: that it is on the front, and how far it may be from the best."""
    if plan.is_on_front:
        yield "on the front"
    if answer and answer.is_first and isinstance(answer.outcome, Plan):
        yield f"roughly: at most {answer.outcome.solver.gap:.0%} slower than the best"
    if answer and answer.stopped:
        yield "stopped"


def share_of_point(answer: Answer | None) -> float:
    """The done share of the search of a point, 0 to 1."""
    if answer is None:
        return 0.0
    return _FIRST_SHARE if answer.is_first else 1.0
