"""The frame of every page: one file with its style inside, which fetches nothing."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from meshwright.planner.report import words
from meshwright.planner.report.html import Html, tag

_NOTHING_FETCHED = "default-src 'none'; style-src 'unsafe-inline'"
_COLOURS = (*words.COLOURS, "c-refit", "c-other")


def page(title: str, *content: str) -> str:
    """The text of an HTML file."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_NOTHING_FETCHED),
        tag("title", title),
        tag("style", Html(_style())),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', _patterns(), tag('main', *content)), lang='en')}\n"


@cache
def _style() -> str:
    return files("meshwright.planner.report").joinpath("style.css").read_text(encoding="utf-8")


def _patterns() -> Html:
    """A hatching in every colour, for the whole page."""
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
