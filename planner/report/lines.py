"""Line charts: one line for each series over a swept value, with the vertical axis from zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshwright.planner.report.axis import Axis, linear
from meshwright.planner.report.html import Html, tag

_HEIGHT = 250.0
"""Height of a plot in pixels."""

_SPACE_ABOVE, _SPACE_BELOW = 12.0, 44.0
"""Space above and below the plot in pixels: for half a label, and for two rows of text."""

_POINT_CLASS = {True: "point", False: "point open"}


@dataclass(frozen=True)
class PlotPoint:
    """A point of a plot. `sound` is False for a value that breaks a rule, such as one that does not fit in memory; it
    is drawn as an open circle."""

    x: float
    y: float
    title: str
    is_valid: bool = True


@dataclass(frozen=True)
class Series:
    """A series of points from left to right, drawn as circles if `marked` and connected if `joined`. A guide is a
    dashed line without points."""

    name: str
    colour: str
    points: tuple[PlotPoint, ...]
    joined: bool = True
    guide: bool = False
    marked: bool = True


def plot(series: Sequence[Series], *, across: Axis, names: Sequence[str], what: str, up: str, describe: str) -> Html:
    """Return a plot. `names` are the labels of the ticks of the axis `across`, `what` is the swept quantity, and `up`
    is the plotted quantity with its unit. The vertical axis starts at zero, or at the lowest negative value."""
    values = [point.y for one in series for point in one.points]
    lowest, highest = min(0.0, *values, 0.0), max(values, default=1.0)
    margin = 0.08 * (highest - lowest)
    upwards = linear(lowest - margin if lowest < 0 else 0.0, highest + margin or 1.0)
    elements = [
        *_plot_grid(across, upwards, names),
        *(_line(one, across, upwards) for one in series),
        tag("text", what, x="100%", y=_HEIGHT + 36, text_anchor="end", class_="tick"),
    ]
    title = tag("title", describe)
    inner = tag("svg", *elements, y=_SPACE_ABOVE, overflow="visible")
    chart = tag(
        "svg", title, inner, class_="plot", role="img", width="100%", height=_SPACE_ABOVE + _HEIGHT + _SPACE_BELOW
    )
    ticks = (
        tag("span", f"{tick:,g}", style=f"top:{_SPACE_ABOVE + _y(upwards, tick) - 9:.1f}px;height:18px")
        for tick in upwards.ticks
    )
    return tag("div", tag("h3", up), tag("div", tag("div", *ticks, class_="margin"), chart, class_="picture lines"))


def _plot_grid(across: Axis, upwards: Axis, names: Sequence[str]) -> Iterator[Html]:
    for tick in upwards.ticks:
        yield tag("line", x1="0", x2="100%", y1=_y(upwards, tick), y2=_y(upwards, tick), class_="grid")
    for tick, name in zip(across.ticks, names, strict=True):
        x = across.x(tick)
        yield tag("line", x1=x, x2=x, y1="0", y2=_HEIGHT + 4, class_="grid")
        yield tag("text", name, x=x, y=_HEIGHT + 18, text_anchor="middle", class_="tick")


def _line(series: Series, across: Axis, upwards: Axis) -> Html:
    look = "ideal" if series.guide else "series"
    lines = [
        tag("line", x1=across.x(a.x), x2=across.x(b.x), y1=_y(upwards, a.y), y2=_y(upwards, b.y), class_=look)
        for a, b in pairwise(series.points if series.joined else ())
    ]
    points = [
        tag(
            "g",
            tag("title", f"{series.name} {point.title}".strip()),
            tag("circle", cx=across.x(point.x), cy=_y(upwards, point.y), r="4", class_=_POINT_CLASS[point.is_valid]),
        )
        for point in (series.points if series.marked and not series.guide else ())
    ]
    return tag("g", *lines, *points, class_=series.colour)


def _y(upwards: Axis, value: float) -> float:
    return _HEIGHT * (1 - upwards.percent(value) / 100)
