"""A page is one file in English that fetches nothing, with a hatching in every colour."""

from __future__ import annotations

from meshwright.planner.report import formatting
from meshwright.planner.report.html import page
from tests.planner.report.pages import Outline

HOSTILE = "</title><script>alert(1)</script>"


def outline(text: str) -> Outline:
    return Outline(text.replace("<!doctype html>", ""))


def test_a_page_has_its_title_and_its_content_escaped() -> None:
    text = page(HOSTILE, HOSTILE)
    assert text.startswith("<!doctype html>\n<html")
    found = outline(text)
    assert "script" not in found.names
    assert found.text.count(HOSTILE) == 2


def test_the_style_is_inside_and_nothing_is_allowed_to_be_fetched() -> None:
    found = outline(page("a page"))
    assert "style" in found.names
    assert "link" not in found.names
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in found.attributes
    assert "url(http" not in page("a page")


def test_every_colour_has_a_hatching() -> None:
    colours = [*formatting.COLOURS, "c-refit", "c-other"]
    assert outline(page("a page")).ids == [f"hatch-{colour}" for colour in colours]
