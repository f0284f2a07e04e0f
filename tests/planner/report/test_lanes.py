"""Boxes lie on their lanes within the width, and say no more than there is room for."""

from __future__ import annotations

import re

import pytest
from markupsafe import Markup

from meshwright.planner.report.charts import Box, Label, Mark, lane_chart, linear
from tests.planner.report.pages import Outline, titles


def drawn(
    *boxes: Box, marks: tuple[Mark, ...] = (), labels: tuple[Label, ...] = (), lane_height: float = 40.0
) -> Markup:
    axis = linear(0.0, 10.0)
    return lane_chart(
        boxes, axis=axis, unit="s", num_lanes=3, lane_height=lane_height, marks=marks, labels=labels, describe="boxes"
    )


def box(start: float, end: float, *lines: str, lane: int = 0, look: str = "solid") -> Box:
    title = f"{start:g}-{end:g}"
    return Box(first=lane, last=lane, start=start, end=end, colour="c-other", title=title, lines=lines, look=look)


def test_a_picture_says_what_it_shows_and_every_box_its_title() -> None:
    assert titles(drawn(box(0, 1), box(2, 5))) == ["boxes", "0-1", "2-5"]


def test_a_box_beyond_the_axis_is_cut_at_its_end() -> None:
    whole, cut = (re.findall(r'width="([\d.]+)%"', drawn(box(0, end))) for end in (10.0, 1000.0))
    assert cut == whole


def test_lines_are_shown_from_the_first_on_while_there_is_room() -> None:
    lines = ("one", "two", "three")
    roomy = Outline(drawn(box(0, 10, *lines), lane_height=60.0)).text
    flat = Outline(drawn(box(0, 10, *lines), lane_height=16.0)).text
    narrow = Outline(drawn(box(0, 0.1, *lines), lane_height=60.0)).text
    assert [line for line in lines if line in roomy] == list(lines)
    assert [line for line in lines if line in flat] == ["one"]
    assert [line for line in lines if line in narrow] == []


@pytest.mark.parametrize("look", ["solid", "hatched", "faint"])
def test_a_look_is_a_class_and_a_hatching_is_that_of_the_colour(look: str) -> None:
    text = drawn(box(0, 5, look=look))
    assert f'class="{look}"' in text
    assert ("url(#hatch-c-other)" in text) == (look == "hatched")


def test_marks_and_labels_stand_beside_the_boxes() -> None:
    outline = Outline(drawn(box(0, 5), marks=(Mark(7, "limit", limit=True),), labels=(Label(0, 2, "all <lanes>"),)))
    assert "limit" in outline.text
    assert "all <lanes>" in outline.text
    assert ("class", "limit") in outline.attributes
