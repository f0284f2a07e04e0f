"""HTML building blocks and the frame of every page: a single file that includes its styles and loads no other
resource. Markup has its own type, `Html`; any other text is escaped when it enters a page.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files

from meshwright.planner.report import formatting

_VOID = ("meta", "rect", "line", "circle")
"""Elements that are written without content."""


class Html(str):
    """A string that is markup already and is not escaped again."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: object) -> Html:
    """Return an element. Attribute names drop a trailing underscore and write others as hyphens (`class_`,
    `text_anchor`); attributes that are None are left out."""
    rendered = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_attribute_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{rendered}/>" if name in _VOID else f"<{name}{rendered}>{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Html:
    """Concatenate parts; those that are not `Html` are escaped."""
    return Html("".join(part if isinstance(part, Html) else html.escape(part) for part in parts))


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> Html:
    """Return a table; without a head if all headings are empty. The columns `numbers` are aligned to the right.

    A table that is wider than the page can be scrolled with the keyboard.
    """

    def cell(name: str, column: int, text: str) -> Html:
        return tag(name, text, class_="number" if column in numbers else None)

    def row(name: str, texts: Sequence[str]) -> Html:
        return tag("tr", *(cell(name if text else "td", column, text) for column, text in enumerate(texts)))

    body = tag("tbody", *(row("td", texts) for texts in rows))
    head = [tag("thead", row("th", headings))] if any(headings) else []
    return tag("div", tag("table", *head, body), class_="wide", tabindex=0)


def section(name: str, heading: str, *content: str) -> Html:
    """Return a section of the page, with `name` as its anchor."""
    return tag("section", tag("h2", heading), *content, id=name)


def note(*text: str) -> Html:
    """Return a paragraph that explains a chart."""
    return tag("p", *text, class_="note")


def badge(text: str) -> Html:
    """Return a label, such as the clock of a run."""
    return tag("span", text, class_="badge")


def _attribute_text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


_CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_COLOURS = (*formatting.COLOURS, "c-refit", "c-other")


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
