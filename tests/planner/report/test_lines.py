"""Lines over a swept value: a point for each answer, joined only where values have an order."""

from __future__ import annotations

import re

from markupsafe import Markup

from meshwright.planner.report.charts import PlotPoint, Series, at_values, plot
from tests.planner.report.pages import Outline, circles, titles

VALUES = (1.0, 2.0, 4.0)


def series(*heights: float, joined: bool = True, guide: bool = False, sound: bool = True) -> Series:
    points = tuple(PlotPoint(x, y, f"{x:g}: {y:g}", sound) for x, y in zip(VALUES, heights, strict=True))
    return Series("ours", "c-other", points, joined=joined, guide=guide)


def drawn(*found: Series) -> Markup:
    names = [f"{value:g} nodes" for value in VALUES]
    return plot(
        found, x_axis=at_values(VALUES), tick_labels=names, x_label="nodes", y_label="step time, s", describe="a plot"
    )


def test_every_point_is_a_circle_with_its_title_and_neighbours_are_joined() -> None:
    page = drawn(series(3.0, 2.0, 1.0))
    assert circles(page) == 3
    assert page.count('class="series"') == 2
    assert titles(page) == ["a plot", "ours 1: 3", "ours 2: 2", "ours 4: 1"]


def test_points_without_an_order_are_not_joined_and_a_guide_has_no_points() -> None:
    assert 'class="series"' not in drawn(series(3.0, 2.0, 1.0, joined=False))
    guide = drawn(series(3.0, 2.0, 1.0, guide=True))
    assert circles(guide) == 0
    assert guide.count('class="ideal"') == 2


def test_a_value_that_breaks_a_rule_is_open() -> None:
    assert drawn(series(3.0, 2.0, 1.0, sound=False)).count('class="point open"') == 3


def test_a_larger_value_is_higher_and_none_leaves_the_picture() -> None:
    heights = [float(y) for y in re.findall(r'cy="([\d.]+)"', drawn(series(1.0, 2.0, 30.0)))]
    assert heights == sorted(heights, reverse=True)
    assert all(0 <= height <= 250 for height in heights)


def test_each_swept_value_is_named() -> None:
    text = Outline(drawn(series(1.0, 2.0, 3.0))).text
    assert [name for name in text if name.endswith("nodes")] == ["1 nodes", "2 nodes", "4 nodes", "nodes"]
