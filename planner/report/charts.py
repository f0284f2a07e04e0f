"""The chart types of the report: boxes on lanes over an axis, used for timelines and stacked bars, and line charts.

Positions along an axis are percentages and text keeps its size, so a chart fits any width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshwright.planner.report.html import Html, join, tag

_MAX_TICKS = 8
"""Maximum number of intervals between ticks, so that neighbouring labels fit on a narrow page."""

_LOG_RATIO = 4.0
"""Minimum ratio of the largest to the smallest value for a logarithmic axis."""


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high` over the whole width, linear or logarithmic."""

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def percent(self, value: float) -> float:
        low, high, position = (math.log(v) if self.logarithmic else v for v in (self.low, self.high, value))
        return 100 * (position - low) / (high - low)

    def x(self, value: float) -> str:
        return f"{self.percent(value):.4g}%"


def linear(low: float, high: float) -> Axis:
    """Return a linear axis from `low` to `high` with ticks at round numbers."""
    high = high if high > low else low + 1.0
    rough = (high - low) / _MAX_TICKS
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(magnitude * m for m in (1, 2, 5, 10) if magnitude * m >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Axis(low, high, tuple(step * n for n in range(first, last + 1)))


def at_values(values: Sequence[float]) -> Axis:
    """Return an axis with ticks at the values and a margin around them; logarithmic for a wide range."""
    ticks = tuple(sorted(set(values)))
    low, high = ticks[0], ticks[-1]
    if low == high:
        return Axis(low - 1, high + 1, ticks)
    if low > 0 and high / low >= _LOG_RATIO:
        room = (high / low) ** 0.08
        return Axis(low / room, high * room, ticks, logarithmic=True)
    room = 0.08 * (high - low)
    return Axis(low - room, high + room, ticks)


_AXIS_HEIGHT = 24.0
"""Height below the lanes in pixels, for the ticks."""

_MIN_BOX_HEIGHT = 1.0
"""Smallest height of a box in pixels."""

_LINE_HEIGHT = 14.0
"""Height of a line of text in pixels; letters are 12 pixels high in the style sheet."""

_NARROW_WIDTH, _FULL_WIDTH = 560.0, 900.0
"""Widths of a chart in pixels on a narrow page and on a page of full width; a label is shown where it fits."""

_LETTER_WIDTH = 6.6
"""Width of a letter in pixels, rounded up."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box on the lanes [first, last] from `start` to `end` of the axis, with as many of `lines` as fit; `look` is its
    fill."""

    first: float
    last: float
    start: float
    end: float
    colour: str
    title: str
    lines: tuple[str, ...] = ()
    look: str = "solid"  # solid | hatched | faint
    opacity: float = 1.0


@dataclass(frozen=True)
class Label:
    """A text in the margin beside the lanes [first, last]."""

    first: float
    last: float
    text: str


@dataclass(frozen=True)
class Mark:
    """A line across all lanes at a value of the axis; `limit` styles it as one that must not be crossed."""

    at: float
    text: str
    limit: bool = False


def lane_chart(
    boxes: Iterable[Box],
    *,
    axis: Axis,
    unit: str,
    num_lanes: int,
    lane_height: float,
    labels: Sequence[Label] = (),
    rules: Sequence[float] = (),
    marks: Sequence[Mark] = (),
    describe: str,
) -> Html:
    """Return the chart: lanes from top to bottom, `rules` as lines between lanes, and `marks`. `describe` is the title
    for screen readers."""
    height = num_lanes * lane_height
    above = _LINE_HEIGHT + 4 if marks else 0.0
    elements = [
        *_grid(axis, height, unit),
        *(tag("line", x1="0", x2="100%", y1=at * lane_height, y2=at * lane_height, class_="rule") for at in rules),
        *(_box(box, axis, lane_height) for box in boxes),
        *(_mark(mark, axis, height) for mark in marks),
    ]
    plot = tag(
        "svg",
        tag("title", describe),
        tag("svg", *elements, y=above, overflow="visible"),
        class_="plot",
        role="img",
        width="100%",
        height=above + height + _AXIS_HEIGHT,
    )
    margin = tag("div", *(_label(label, above, lane_height) for label in labels), class_="margin")
    return tag("div", margin, plot, class_="picture")


def legend(entries: Iterable[tuple[str, str, str]]) -> Html:
    """Return a legend; each entry is (CSS class of the colour, look, text)."""
    items = [
        tag("li", tag("svg", tag("rect", width="100%", height="100%", **_fill(colour, look)), class_=colour), text)
        for colour, look, text in entries
    ]
    return tag("ul", *items, class_="legend")


def _grid(axis: Axis, height: float, unit: str) -> Iterable[Html]:
    for tick in axis.ticks:
        x, percent = axis.x(tick), axis.percent(tick)
        anchor = "start" if percent < 2 else "end" if percent > 95 else "middle"
        last = tick == axis.ticks[-1]
        yield tag("line", x1=x, x2=x, y1="0", y2=height + 4, class_="grid")
        text = f"{tick:g} {unit}" if last else f"{tick:g}"
        yield tag("text", text, x=x, y=height + 18, text_anchor=anchor, class_="tick")


def _box(box: Box, axis: Axis, lane_height: float) -> Html:
    start, end = (min(max(value, axis.low), axis.high) for value in (box.start, box.end))
    width = axis.percent(end) - axis.percent(start)
    height = max((box.last + 1 - box.first) * lane_height - 1, _MIN_BOX_HEIGHT)
    geometry = {"x": axis.x(start), "y": box.first * lane_height + 0.5, "width": f"{width:.4g}%", "height": height}
    title = tag("title", box.title)
    fits_narrow, fits_full = (
        _num_lines(box.lines, width / 100 * page_width, height) for page_width in (_NARROW_WIDTH, _FULL_WIDTH)
    )
    if not fits_full:
        shape = Html(tag("rect", **geometry, **_fill(box.colour, box.look)).removesuffix("/>") + f">{title}</rect>")
        return tag("g", shape, class_=box.colour, opacity=box.opacity if box.opacity < 1 else None)
    top = (height - _LINE_HEIGHT * fits_full) / 2 + 11
    shown = join(
        tag("text", line, x="6", y=top + _LINE_HEIGHT * number, class_=_line_class(number, fits_narrow))
        for number, line in enumerate(box.lines[:fits_full])
    )
    shape = tag(
        "rect",
        width="100%",
        height="100%",
        opacity=box.opacity if box.opacity < 1 else None,
        **_fill(box.colour, box.look),
    )
    return tag("svg", title, shape, shown, class_=f"box {box.colour} {box.look}", **geometry)


def _num_lines(lines: Sequence[str], width: float, height: float) -> int:
    """The number of lines that fit, from the first on."""
    rows = lines[: max(0, int((height + 2) // _LINE_HEIGHT))]
    too_long = (index for index, line in enumerate(rows) if len(line) * _LETTER_WIDTH > width - 10)
    return next(too_long, len(rows))


def _line_class(number: int, fits_narrow: int) -> str | None:
    classes = ["strong"] * (number == 0) + ["roomy"] * (number >= fits_narrow)
    return " ".join(classes) or None


def _fill(colour: str, look: str) -> dict[str, str]:
    if look == "hatched":
        return {"fill": f"url(#hatch-{colour})", "class_": "hatched"}
    return {"class_": look}


def _mark(mark: Mark, axis: Axis, height: float) -> Html:
    x, percent = axis.x(mark.at), axis.percent(mark.at)
    look = "limit" if mark.limit else "mark"
    text = tag("text", mark.text, x=x, y="-6", text_anchor="end" if percent > 12 else "start", class_=look)
    return join([tag("line", x1=x, x2=x, y1="-4", y2=height + 4, class_=look), text])


def _label(label: Label, above: float, lane_height: float) -> Html:
    top, height = above + label.first * lane_height, (label.last + 1 - label.first) * lane_height
    return tag("span", label.text, style=f"top:{top:.1f}px;height:{height:.1f}px", title=label.text)


_HEIGHT = 250.0
"""Height of a plot in pixels."""

_SPACE_ABOVE, _SPACE_BELOW = 12.0, 44.0
"""Space above and below the plot in pixels: for half a label, and for two rows of text."""

_POINT_CLASS = {True: "point", False: "point open"}


@dataclass(frozen=True)
class PlotPoint:
    """A point of a plot. `is_valid` is False for a value that breaks a rule, such as one that does not fit in memory;
    it is drawn as an open circle."""

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
