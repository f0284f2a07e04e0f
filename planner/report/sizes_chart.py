"""The section on other numbers of GPUs: step time of the best plan of a job on clusters of several sizes."""

from __future__ import annotations

from meshwright.planner.analysis.whatif import Outlook, WhatIf
from meshwright.planner.plan.settings import Setting
from meshwright.planner.report import words
from meshwright.planner.report.axis import at_values
from meshwright.planner.report.html import Html, join, note, section, table
from meshwright.planner.report.lanes import legend
from meshwright.planner.report.lines import PlotPoint, Series, plot


def sizes(what_if: WhatIf | None) -> Html:
    """Return the section: the plot and the table, or a hint how to get them."""
    if what_if is None:
        return section("sizes", "Other numbers of GPUs", note("Not requested: --sizes 8,16,32 plans the job on each."))
    outlooks = {_num_ranks(answer.setting): answer for answer in what_if.answers}
    planned = {size: answer.outlook for size, answer in sorted(outlooks.items()) if answer.outlook}
    plots = [_sizes_plot(planned)] if planned else []
    rows = [
        (
            str(size),
            *(_size_numbers(size, answer.outlook, planned) if answer.outlook else ("",) * 5),
            "" if answer.fits else " ".join(answer.broken),
        )
        for size, answer in sorted(outlooks.items())
    ]
    headings = ("GPUs", "step s", "tokens/s", "speed-up", "efficiency", "GPU-hours of 1000 steps", "why not")
    summary = note("Predicted: the best plan of the same job on each number of GPUs.")
    notes = [note(sentence) for sentence in what_if.notes]
    return section("sizes", "Other numbers of GPUs", summary, *plots, table(headings, rows, numbers=range(6)), *notes)


def _num_ranks(setting: Setting) -> int:
    return int(setting["cluster.nodes"]) * int(setting["cluster.ranks_per_node"])


def _sizes_plot(planned: dict[int, Outlook]) -> Html:
    smallest = min(planned)
    work = planned[smallest].step_seconds * smallest
    points = tuple(
        PlotPoint(float(size), outlook.step_seconds, f"{size} GPUs: {words.seconds(outlook.step_seconds)}")
        for size, outlook in planned.items()
    )
    ideal = tuple(PlotPoint(point.x, work / point.x, "") for point in points)
    series = (Series("in proportion", "c-other", ideal, guide=True), Series("", words.COLOURS[0], points))
    chart = plot(
        series,
        across=at_values([point.x for point in points]),
        names=[str(size) for size in planned],
        what="GPUs",
        up="step time, s",
        describe="step time against the number of GPUs",
    )
    entries = ((words.COLOURS[0], "solid", "the best plan"), ("c-other", "faint", f"{smallest} GPUs in proportion"))
    return join([legend(entries), chart])


def _size_numbers(size: int, outlook: Outlook, planned: dict[int, Outlook]) -> tuple[str, ...]:
    smallest = min(planned)
    faster = planned[smallest].step_seconds / outlook.step_seconds
    return (
        f"{outlook.step_seconds:.3f}",
        f"{outlook.tokens_per_second:,.0f}",
        f"{faster:.2f}",
        words.percent(faster * smallest / size),
        f"{outlook.gpu_hours:,.1f}",
    )
