"""Pages: values are escaped wherever they enter, and a page is one file in English that fetches nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from markupsafe import Markup

from meshwright.planner.report import formatting
from meshwright.planner.report.charts import Label, lane_chart, linear
from meshwright.planner.report.rendering import ENVIRONMENT, page, render
from tests.planner.report.pages import Outline

HOSTILE = "</title><script>alert('\"&{{ 7 * 6 }}')</script>"


def parts(text: str, **values: object) -> Outline:
    """What a template makes that imports the shared parts."""
    template = ENVIRONMENT.from_string('{% from "parts.html" import table, legend %}' + text)
    return Outline(template.render(values))


def chart(text: str) -> Outline:
    return Outline(
        lane_chart(
            [], axis=linear(0.0, 1.0), unit="s", num_lanes=1, lane_height=9.0, labels=[Label(0, 0, text)], describe=text
        )
    )


@given(st.text().filter(str.strip))
def test_any_text_is_read_back_as_it_was(text: str) -> None:
    outline = chart(text)
    assert outline.text[:2] == [text, text]
    assert outline.attributes.count(("title", text)) == 1
    assert set(outline.names) == {"div", "span", "svg", "title", "line", "text"}


def test_text_is_escaped_in_a_page_and_markup_is_not() -> None:
    outline = Outline(page(HOSTILE, HOSTILE, HOSTILE, Markup("<b>bold</b>")))
    assert "script" not in outline.names
    assert [text.strip() for text in outline.text].count(HOSTILE) == 4  # also in the <title>
    assert "bold" in outline.text


def test_a_table_without_headings_has_no_head() -> None:
    bare = parts("{{ table(('', ''), rows) }}", rows=[("a", HOSTILE)])
    assert "thead" not in bare.names
    assert HOSTILE in bare.text
    headed = parts("{{ table(('x',), rows, numbers=(0,)) }}", rows=[(HOSTILE,)])
    assert headed.names == ["div", "table", "thead", "tr", "th", "tbody", "tr", "td"]
    assert headed.attributes.count(("class", "number")) == 2


def test_a_legend_has_an_entry_for_each_colour_and_look() -> None:
    outline = parts("{{ legend(entries) }}", entries=[("c-a", "solid", "one"), ("c-b", "hatched", "two")])
    assert outline.names.count("li") == 2
    assert outline.text == ["one", "two"]
    assert ("fill", "url(#hatch-c-b)") in outline.attributes


def test_a_value_that_a_template_misses_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'rows' is undefined"):
        render("idle.html", summary="", chart="")


def test_a_page_has_its_style_inside_and_nothing_is_allowed_to_be_fetched() -> None:
    text = page("a page", "")
    assert text.startswith("<!doctype html>\n<html")
    outline = Outline(text)
    assert "style" in outline.names
    assert "link" not in outline.names
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in outline.attributes
    assert "url(http" not in text


def test_every_colour_has_a_hatching() -> None:
    colours = [*formatting.COLOURS, "c-refit", "c-other"]
    assert Outline(page("a page", "")).ids == [f"hatch-{colour}" for colour in colours]
