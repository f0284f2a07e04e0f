"""The chart types of the report: boxes on lanes over an axis, used for timelines and stacked bars, and line charts.

Positions along an axis are percentages and text keeps its size, so a chart fits any width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from meshwright.planner.report.rendering import render

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

_PHONE_WIDTH, _NARROW_WIDTH, _FULL_WIDTH = 225.0, 560.0, 900.0
"""Widths of a chart in pixels on a telephone, on a narrow page and on a page of full width; a label is shown where it
fits."""

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
) -> Markup:
    """Return the chart: lanes from top to bottom, `rules` as lines between lanes, and `marks`. `describe` is the title
    for screen readers."""
    above = _LINE_HEIGHT + 4 if marks else 0.0
    return render(
        "lane_chart.html",
        describe=describe,
        above=above,
        height=num_lanes * lane_height,
        below=_AXIS_HEIGHT,
        labels=[_placed_label(label, above, lane_height) for label in labels],
        ticks=[_tick(axis, value, unit) for value in axis.ticks],
        rules=[at * lane_height for at in rules],
        boxes=[_placed_box(box, axis, lane_height) for box in boxes],
        marks=[_placed_mark(mark, axis) for mark in marks],
    )


@dataclass(frozen=True)
class _Tick:
    """A tick of an axis: its position, and its text with the SVG anchor. The style sheet hides the text of a dense one
    on a telephone."""

    x: str
    text: str
    anchor: str = "middle"
    is_dense: bool = False


def _tick(axis: Axis, value: float, unit: str) -> _Tick:
    """A tick whose text stays within the plot; the last one names the unit."""
    percent = axis.percent(value)
    anchor = "start" if percent < 2 else "end" if percent > 95 else "middle"
    text = f"{value:g} {unit}" if value == axis.ticks[-1] else f"{value:g}"
    return _Tick(axis.x(value), text, anchor, is_dense=(len(axis.ticks) - axis.ticks.index(value)) % 2 == 0)


@dataclass(frozen=True)
class _PlacedLine:
    """A line of text in a box. The style sheet hides a `roomy` line where the page is narrow, and one that needs a
    `wider` page than a telephone's there."""

    text: str
    y: float
    classes: str


@dataclass(frozen=True, kw_only=True)
class _PlacedBox:
    """A box at its position in the plot; heights in pixels, widths in percent."""

    x: str
    y: float
    width: str
    height: float
    colour: str
    look: str
    opacity: float
    title: str
    lines: tuple[_PlacedLine, ...]


def _placed_box(box: Box, axis: Axis, lane_height: float) -> _PlacedBox:
    start, end = (min(max(value, axis.low), axis.high) for value in (box.start, box.end))
    width = axis.percent(end) - axis.percent(start)
    height = max((box.last + 1 - box.first) * lane_height - 1, _MIN_BOX_HEIGHT)
    fits_phone, fits_narrow, fits_full = (
        _num_lines(box.lines, width / 100 * chart_width, height)
        for chart_width in (_PHONE_WIDTH, _NARROW_WIDTH, _FULL_WIDTH)
    )
    top = (height - _LINE_HEIGHT * fits_full) / 2 + 11
    return _PlacedBox(
        x=axis.x(start),
        y=box.first * lane_height + 0.5,
        width=f"{width:.4g}%",
        height=height,
        colour=box.colour,
        look=box.look,
        opacity=box.opacity,
        title=box.title,
        lines=tuple(
            _PlacedLine(line, top + _LINE_HEIGHT * number, _line_classes(number, fits_phone, fits_narrow))
            for number, line in enumerate(box.lines[:fits_full])
        ),
    )


def _num_lines(lines: Sequence[str], width: float, height: float) -> int:
    """The number of lines that fit, from the first on."""
    rows = lines[: max(0, int((height + 2) // _LINE_HEIGHT))]
    too_long = (index for index, line in enumerate(rows) if len(line) * _LETTER_WIDTH > width - 10)
    return next(too_long, len(rows))


def _line_classes(number: int, fits_phone: int, fits_narrow: int) -> str:
    classes = []
    if number == 0:
        classes.append("strong")
    if number >= fits_narrow:
        classes.append("roomy")
    elif number >= fits_phone:
        classes.append("wider")
    return " ".join(classes)


@dataclass(frozen=True)
class _PlacedMark:
    """A mark at its position, with its text on the side that has room."""

    x: str
    text: str
    anchor: str
    look: str


def _placed_mark(mark: Mark, axis: Axis) -> _PlacedMark:
    anchor = "end" if axis.percent(mark.at) > 12 else "start"
    return _PlacedMark(axis.x(mark.at), mark.text, anchor, "limit" if mark.limit else "mark")


@dataclass(frozen=True)
class _PlacedLabel:
    """A label at its position in pixels."""

    top: float
    height: float
    text: str


def _placed_label(label: Label, above: float, lane_height: float) -> _PlacedLabel:
    top, height = above + label.first * lane_height, (label.last + 1 - label.first) * lane_height
    return _PlacedLabel(top, height, label.text)


_HEIGHT = 250.0
"""Height of a plot in pixels."""

_SPACE_ABOVE, _SPACE_BELOW = 12.0, 44.0
"""Space above and below the plot in pixels: for half a label, and for two rows of text."""


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


def plot(
    series: Sequence[Series], *, x_axis: Axis, tick_labels: Sequence[str], x_label: str, y_label: str, describe: str
) -> Markup:
    """Return a plot. `tick_labels` are those of `x_axis`, `x_label` is the swept quantity, and `y_label` the plotted
    quantity with its unit. The vertical axis starts at zero, or at the lowest negative value."""
    values = [point.y for one in series for point in one.points]
    lowest, highest = min(0.0, *values, 0.0), max(values, default=1.0)
    margin = 0.08 * (highest - lowest)
    upwards = linear(lowest - margin if lowest < 0 else 0.0, (highest + margin) or 1.0)
    return render(
        "plot.html",
        describe=describe,
        y_label=y_label,
        x_label=x_label,
        above=_SPACE_ABOVE,
        height=_HEIGHT,
        below=_SPACE_BELOW,
        upward_ticks=[_UpwardTick(_y(upwards, tick), f"{tick:,g}") for tick in upwards.ticks],
        ticks=[_Tick(x_axis.x(tick), label) for tick, label in zip(x_axis.ticks, tick_labels, strict=True)],
        series=[_placed_series(one, x_axis, upwards) for one in series],
    )


@dataclass(frozen=True)
class _UpwardTick:
    """A tick of the vertical axis: its position in pixels, and its text."""

    y: float
    text: str


@dataclass(frozen=True)
class _PlacedPoint:
    """A point at its position in the plot."""

    x: str
    y: float
    title: str
    look: str


@dataclass(frozen=True)
class _PlacedSeries:
    """A series at its position: the ends of its lines, and the points that are drawn as circles."""

    colour: str
    look: str
    lines: Sequence[tuple[_PlacedPoint, _PlacedPoint]]
    circles: Sequence[_PlacedPoint]


def _placed_series(series: Series, x_axis: Axis, upwards: Axis) -> _PlacedSeries:
    points = [
        _PlacedPoint(
            x_axis.x(point.x),
            _y(upwards, point.y),
            f"{series.name} {point.title}".strip(),
            "point" if point.is_valid else "point open",
        )
        for point in series.points
    ]
    return _PlacedSeries(
        colour=series.colour,
        look="ideal" if series.guide else "series",
        lines=list(pairwise(points)) if series.joined else [],
        circles=points if series.marked and not series.guide else [],
    )


def _y(upwards: Axis, value: float) -> float:
    return _HEIGHT * (1 - upwards.percent(value) / 100)
