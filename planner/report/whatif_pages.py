"""Charts of what-if answers: step time on several numbers of GPUs, as a section and as a page, and the page of a sweep
over ranges of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from meshwright.planner.analysis.sweep import Sweep, SweepPoint
from meshwright.planner.analysis.whatif import Consequence, PlanMetrics, WhatIf
from meshwright.planner.job.whatif_settings import Setting
from meshwright.planner.report import formatting
from meshwright.planner.report.charts import Axis, PlotPoint, Series, at_values, linear, plot
from meshwright.planner.report.rendering import page, render
from meshwright.profiles.errors import BadInput


def sizes(what_if: WhatIf | None) -> Markup:
    """Return the section on other numbers of GPUs: the plot and the table, or a hint on how to get them."""
    if what_if is None:
        return render("sizes.html", is_requested=False)
    metrics_by_size = {_num_ranks(answer.setting): answer for answer in what_if.answers}
    planned = {size: answer.metrics for size, answer in sorted(metrics_by_size.items()) if answer.metrics}
    rows = [
        (
            str(size),
            *(_size_numbers(size, answer.metrics, planned) if answer.metrics else ("",) * 5),
            "" if answer.fits else " ".join(answer.violations),
        )
        for size, answer in sorted(metrics_by_size.items())
    ]
    entries = (
        (formatting.COLOURS[0], "solid", "the best plan"),
        ("c-other", "faint", f"{min(planned, default=0)} GPUs, linear scaling"),
    )
    return render(
        "sizes.html",
        is_requested=True,
        entries=entries,
        chart=_sizes_plot(planned) if planned else "",
        rows=rows,
        notes=what_if.notes,
    )


def _num_ranks(setting: Setting) -> int:
    return int(setting["cluster.nodes"]) * int(setting["cluster.ranks_per_node"])


def _sizes_plot(planned: dict[int, PlanMetrics]) -> Markup:
    smallest = min(planned)
    work = planned[smallest].step_seconds * smallest
    points = tuple(
        PlotPoint(float(size), metrics.step_seconds, f"{size} GPUs: {formatting.seconds(metrics.step_seconds)}")
        for size, metrics in planned.items()
    )
    ideal = tuple(PlotPoint(point.x, work / point.x, "") for point in points)
    series = (Series("linear scaling", "c-other", ideal, guide=True), Series("", formatting.COLOURS[0], points))
    return plot(
        series,
        x_axis=at_values([point.x for point in points]),
        tick_labels=[str(size) for size in planned],
        x_label="GPUs",
        y_label="step time, s",
        describe="step time against the number of GPUs",
    )


def _size_numbers(size: int, metrics: PlanMetrics, planned: dict[int, PlanMetrics]) -> tuple[str, ...]:
    smallest = min(planned)
    faster = planned[smallest].step_seconds / metrics.step_seconds
    return (
        f"{metrics.step_seconds:.3f}",
        f"{metrics.tokens_per_second:,.0f}",
        f"{faster:.2f}",
        formatting.percent(faster * smallest / size),
        f"{metrics.gpu_hours:,.1f}",
    )


@dataclass(frozen=True)
class _Swept:
    """The answers of a sweep. `field` is on the horizontal axis; `lines` has the answers for each combination of values
    of the other fields."""

    field: str
    lines: Mapping[str, tuple[Consequence, ...]]


def swept_field(settings: Sequence[Setting]) -> str:
    """Return the first field that has several values. Raises BadInput if there is none."""
    paths = tuple(settings[0])
    field = next((path for path in paths if len({str(setting[path]) for setting in settings}) > 1), None)
    if field is None:
        raise BadInput(
            f"--plot needs a field with several values and {', '.join(paths)} has one; "
            f"separate values by commas, as in --set {paths[0]}=1,2."
        )
    return field


def _swept(answered: WhatIf) -> _Swept:
    field = swept_field([answer.setting for answer in answered.answers])
    lines: dict[str, list[Consequence]] = {}
    for answer in answered.answers:
        other_values = {path: value for path, value in answer.setting.items() if path != field}
        lines.setdefault(formatting.setting(other_values), []).append(answer)
    return _Swept(field, {name: tuple(answers) for name, answers in lines.items()})


def sweep(what_if: WhatIf) -> str:
    """Return the HTML page of a sweep: two plots and a table. Raises BadInput if no field has several values."""
    swept = _swept(what_if)
    method = "planned again for each value" if what_if.replanned else "the same placements re-evaluated"
    axis = _axis_positions(swept)
    notes = [
        f"{formatting.setting(answer.setting)}: {sentence}"
        for answer in what_if.answers
        for sentence in _answer_notes(answer)
    ]
    content = render(
        "sweep.html",
        entries=[
            (colour, "solid", name) for colour, name in zip(formatting.COLOURS, swept.lines, strict=False) if name
        ],
        plots=[
            _sweep_plot(swept, axis, y_label, value_of)
            for y_label, value_of in (("step time, s", _step_seconds), ("response tokens/s", _tokens))
        ],
        rows=_sweep_rows(what_if),
        notes=[*notes, *what_if.notes],
    )
    return page(f"What if {swept.field} changes", f"Predicted, {method}.", content)


@dataclass(frozen=True)
class _AxisPositions:
    """The horizontal position of each value, by its text. Values without an order, such as devices, are not joined by
    lines."""

    positions: Mapping[str, float]
    ordered: bool

    @property
    def names(self) -> list[str]:
        return sorted(self.positions, key=self.positions.__getitem__)


def _axis_positions(swept: _Swept) -> _AxisPositions:
    values = tuple(dict.fromkeys(a.setting[swept.field] for answers in swept.lines.values() for a in answers))
    ordered = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return _AxisPositions({str(v): float(v) if ordered else float(place) for place, v in enumerate(values)}, ordered)


def _sweep_plot(swept: _Swept, axis: _AxisPositions, y_label: str, value_of: Callable[[PlanMetrics], float]) -> Markup:
    """A plot of one metric of the answers, `value_of`, against the field of the sweep."""
    series = []
    for number, (name, answers) in enumerate(swept.lines.items()):
        points = [
            PlotPoint(
                axis.positions[str(answer.setting[swept.field])],
                value_of(answer.metrics),
                f"{formatting.setting(answer.setting)}: {value_of(answer.metrics):,.4g}",
                answer.fits,
            )
            for answer in answers
            if answer.metrics
        ]
        ordered = tuple(sorted(points, key=lambda point: point.x))
        series.append(Series(name, formatting.COLOURS[number % len(formatting.COLOURS)], ordered, joined=axis.ordered))
    x_axis = at_values(tuple(axis.positions.values()))
    return plot(
        series,
        x_axis=x_axis,
        tick_labels=axis.names,
        x_label=swept.field,
        y_label=y_label,
        describe=f"{y_label} by {swept.field}",
    )


def _sweep_rows(answered: WhatIf) -> Iterator[tuple[str, ...]]:
    fits = "yes" if answered.baseline.headroom_bytes >= 0 else "no"
    yield "as planned", *_sweep_numbers(answered.baseline, None), fits
    for answer in answered.answers:
        numbers = _sweep_numbers(answer.metrics, answer.difference) if answer.metrics else ("",) * 6
        yield formatting.setting(answer.setting), *numbers, "yes" if answer.fits else " ".join(answer.violations)


def _sweep_numbers(metrics: PlanMetrics, difference: PlanMetrics | None) -> tuple[str, ...]:
    return (
        f"{metrics.step_seconds:.3f}",
        formatting.difference(difference.step_seconds / (metrics.step_seconds - difference.step_seconds))
        if difference
        else "",
        f"{metrics.tokens_per_second:,.0f}",
        formatting.percent(metrics.idle_share),
        formatting.size(metrics.headroom_bytes),
        f"{metrics.gpu_hours:,.1f}",
    )


def _answer_notes(answer: Consequence) -> Iterator[str]:
    yield from answer.notes
    if answer.extrapolated:
        yield f"extrapolated: {', '.join(answer.extrapolated)}."


def sweep_plots(sweep: Sweep) -> tuple[Markup, ...]:
    """The plots of step time against GPUs and against cost; a line joins the plans that no other one beats in both."""
    planned = [(formatting.setting(point.setting), point.plan) for point in sweep.points if point.plan]
    if not planned:
        return ()
    gpus = [(float(plan.num_ranks), plan.step_seconds, label) for label, plan in planned]
    cost = [(plan.cost.gpu_hours * (sweep.price or 1.0), plan.step_seconds, label) for label, plan in planned]
    by_gpus, by_cost = at_values([x for x, _, _ in gpus]), linear(0.0, 1.08 * max(x for x, _, _ in cost))
    what = f"{'GPU-hours' if sweep.price is None else 'money'} of {sweep.num_steps:,} steps"
    return (
        _front_plot(gpus, by_gpus, [f"{x:,.0f}" for x in by_gpus.ticks], "GPUs"),
        _front_plot(cost, by_cost, [f"{x:,g}" for x in by_cost.ticks], what),
    )


def planned_sweep(sweep: Sweep) -> str:
    """Return the HTML page of the plans of a sweep: step time against GPUs and against cost, and a table from the
    cheapest on."""
    headings = (
        "",
        "GPUs",
        "step",
        "8 of 10 within",
        f"GPU-hours of {sweep.num_steps:,} steps",
        *(() if sweep.price is None else (f"money of {sweep.num_steps:,} steps",)),
        "front",
    )
    rows = [_planned_row(point, len(headings)) for point in sweep.by_cost]
    content = render("planned_sweep.html", plots=sweep_plots(sweep), headings=headings, rows=rows)
    missing = f" {sweep.num_missing} more were not planned before the sweep was stopped." if sweep.num_missing else ""
    summary = f"Predicted, each of {len(sweep.points)} combinations planned, the cheapest first.{missing}"
    return page("Step time, GPUs and cost", summary, content)


def _planned_row(point: SweepPoint, num_cells: int) -> tuple[str, ...]:
    label = formatting.setting(point.setting)
    if point.plan is None:
        return (label, *("",) * (num_cells - 2), "no plan: " + " ".join(point.violations))
    plan = point.plan
    return (
        label,
        f"{plan.num_ranks:,}",
        formatting.seconds(plan.step_seconds),
        formatting.interval(plan.ranges.step_seconds, formatting.seconds),
        f"{plan.cost.gpu_hours:,.1f}",
        *(() if plan.cost.money is None else (f"{plan.cost.money:,.2f}",)),
        "on the front" if plan.is_on_front else "",
    )


def _front_plot(
    points: Sequence[tuple[float, float, str]], x_axis: Axis, tick_labels: Sequence[str], x_label: str
) -> Markup:
    """A plot of (position, step seconds, label) with the front joined."""
    placed = sorted(points)
    front = [one for one in placed if not any(_beats(other, one) for other in placed)]
    series = (
        Series("", "c-other", tuple(_step_point(one, x_label) for one in placed if one not in front), joined=False),
        Series("", formatting.COLOURS[0], tuple(_step_point(one, x_label) for one in front)),
    )
    return plot(
        series,
        x_axis=x_axis,
        tick_labels=tick_labels,
        x_label=x_label,
        y_label="step time, s",
        describe=f"step time against {x_label}",
    )


def _beats(one: tuple[float, float, str], other: tuple[float, float, str]) -> bool:
    return one[:2] != other[:2] and one[0] <= other[0] and one[1] <= other[1]


def _step_point(point: tuple[float, float, str], what: str) -> PlotPoint:
    x, seconds, label = point
    return PlotPoint(x, seconds, f"{label}: {formatting.seconds(seconds)}, {x:,.4g} {what}")


def _step_seconds(metrics: PlanMetrics) -> float:
    return metrics.step_seconds


def _tokens(metrics: PlanMetrics) -> float:
    return metrics.tokens_per_second


def fit_page(what_if: WhatIf, min_ranks: int) -> str:
    """Return the HTML page of `fit`: the smallest number of devices, the plot and the table."""
    summary = f"Predicted: a plan fits on {min_ranks} devices, and on none of the smaller numbers that were tried."
    return page("How many devices", summary, sizes(what_if))
