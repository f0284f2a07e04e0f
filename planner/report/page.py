"""The frame of every HTML page: a single file that includes its styles and loads no other resource."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from meshwright.planner.report import words
from meshwright.planner.report.html import Html, tag

_CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_COLOURS = (*words.COLOURS, "c-refit", "c-other")


def page(title: str, *content: str) -> str:
    """Return the text of an HTML file with this title and content."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_CONTENT_SECURITY_POLICY),
        tag("title", title),
        tag("style", Html(_style())),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', _patterns(), tag('main', *content)), lang='en')}\n"


@cache
def _style() -> str:
    return files("meshwright.planner.report").joinpath("style.css").read_text(encoding="utf-8")


def _patterns() -> Html:
    """Hatch patterns in every colour, for the charts of the page."""
    return tag("svg", tag("defs", *(_pattern(colour) for colour in _COLOURS)), class_="patterns", width="0", height="0")


def _pattern(colour: str) -> Html:
    return tag(
        "pattern",
        tag("rect", width="7", height="7", class_="ground"),
        tag("line", x1="0", x2="0", y1="0", y2="7", class_="stripe"),
        id=f"hatch-{colour}",
        class_=colour,
        width="7",
        height="7",
        patternUnits="userSpaceOnUse",
        patternTransform="rotate(45)",
    )
