"""What the page shows of an answer, drawn by the charts and templates of the report; no cost is computed here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jinja2 import ChoiceLoader, PackageLoader
from markupsafe import Markup

from meshwright.planner.analysis.plan_summary import NextLayout, run_cost
from meshwright.planner.analysis.whatif import plan_metrics
from meshwright.planner.plan.evaluate import free_bytes
from meshwright.planner.plan.plan import Plan
from meshwright.planner.report import formatting
from meshwright.planner.report.rendering import ENVIRONMENT
from meshwright.planner.report.resource_sections import memory, terms
from meshwright.planner.report.timelines import overview, period_timeline
from meshwright.planner.search.no_plan import NoPlan
from meshwright.planner.search.search_control import SearchProgress
from meshwright.profiles.lengths import Histogram
from meshwright.runtime.explorer.controls import controls_of, other_settings
from meshwright.runtime.explorer.searches import Answer, Refusal
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
        can_save_job=source.job is not None,
    )


def script() -> str:
    """The text of the script of the page."""
    return _ENVIRONMENT.get_template("explore.js").render()


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A quantity of the plan, the same as given, and the difference."""

    name: str
    here: str
    given: str = ""
    difference: str = ""


def answer_page(
    source: Source,
    state: State,
    answer: Answer,
    *,
    given: Answer | None,
    layouts: tuple[NextLayout, ...] | None,
    reasons: tuple[str, ...],
) -> Markup:
    """The markup of an answer; `given` is the answer to the unchanged job, and `reasons` what the pins cost."""
    values = {
        "state": state,
        "query": state.query,
        "command": state.command(source.path, source.options),
        "can_save_job": source.job is not None,
        "reasons": reasons,
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
    given_plan = given.outcome if given and state.searched != State() and isinstance(given.outcome, Plan) else None
    workload = outcome.facts.workload
    return _render(
        "answer.html",
        rows=_rows(outcome, state, given_plan),
        has_given=given_plan is not None,
        gap=_gap(outcome),
        sections=(overview(outcome), period_timeline(outcome), memory(outcome), terms(outcome)),
        lengths=[
            (what, f"mean {lengths.mean:,.0f}, longest {lengths.maximum:,} tokens", _bars(lengths))
            for what, lengths in (("prompts", workload.prompt_lengths), ("responses", workload.response_lengths))
        ],
        layouts=None if layouts is None else [_layout_row(one) for one in layouts],
        **values,
    )


def headline(answer: Answer) -> str:
    """The answer in a few words, for the title and the status line."""
    if isinstance(answer.outcome, Plan):
        stopped = ", stopped" if answer.stopped else ""
        return f"{formatting.seconds(answer.outcome.period_seconds)} a step{stopped}"
    return "refused" if isinstance(answer.outcome, Refusal) else "no plan fits"


def _render(template: str, /, **values: object) -> Markup:
    return Markup(_ENVIRONMENT.get_template(template).render(values))


def _rows(plan: Plan, state: State, given: Plan | None) -> list[_Row]:
    before = _quantities(given, state) if given else {}
    return [
        _Row(
            name=name,
            here=here.text,
            given=before[name].text if name in before else "",
            difference=here.minus(before[name]) if name in before else "",
        )
        for name, here in _quantities(plan, state).items()
    ]


@dataclass(frozen=True)
class _Quantity:
    """A number of a plan with its text. Its difference is a share of the other number, or `by` formats it."""

    value: float
    text: str
    by: Callable[[float], str] | None = None

    def minus(self, other: _Quantity) -> str:
        """The difference as text; empty if the two read the same."""
        if self.text == other.text:
            return ""
        change = self.value - other.value
        if self.by is not None:
            return f"{'+' if change > 0 else '-'}{self.by(abs(change))}"
        return f"{change / other.value:+.1%}" if other.value else ""


def _quantities(plan: Plan, state: State) -> dict[str, _Quantity]:
    """The quantities of a plan by name."""
    numbers, cost = plan_metrics(plan), run_cost(plan, state.price, state.num_steps)
    of_steps, num_ranks, free = f"{state.num_steps:,} steps", plan.facts.cluster.num_ranks, free_bytes(plan)
    found = {
        "step": _Quantity(plan.period_seconds, formatting.seconds(plan.period_seconds)),
        "response tokens/s": _Quantity(numbers.tokens_per_second, f"{numbers.tokens_per_second:,.0f}"),
        "GPUs": _Quantity(num_ranks, f"{num_ranks:,}", by="{:.0f}".format),
        f"hours of {of_steps}": _Quantity(cost.hours, f"{cost.hours:,.1f}"),
        f"GPU-hours of {of_steps}": _Quantity(cost.gpu_hours, f"{cost.gpu_hours:,.1f}"),
    }
    if cost.money is not None:
        found[f"money of {of_steps}"] = _Quantity(cost.money, f"{cost.money:,.2f}")
    idle = numbers.idle_share
    found["idle share of the ranks' time"] = _Quantity(idle, formatting.percent(idle), by=formatting.percent)
    found["free memory on the fullest rank"] = _Quantity(free, formatting.size(free), by=formatting.size)
    found["staleness"] = _Quantity(plan.staleness, str(plan.staleness), by="{:.0f}".format)
    return found


def _gap(plan: Plan) -> str:
    solver = plan.solver
    if not solver.gap:
        return "The fastest plan in the space, by this cost model."
    return (
        f"At most {solver.gap:.1%} slower than the best plan in the space, by this cost model (none is faster than "
        f"{formatting.seconds(solver.bound_seconds)})."
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


def share(progress: SearchProgress | None) -> float | None:
    """The done share of a search, 0 to 1: costing is its first half; None before it starts."""
    if progress is None or not progress.total:
        return None
    done = progress.done / progress.total
    return done / 2 if progress.phase == "costing" else 0.5 + done / 2
