"""Markup as a type of its own: text becomes part of a page only escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_VOID = ("meta", "rect", "line", "circle")


class Html(str):
    """Text that is markup already. Any other text is escaped where it enters a page."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: object) -> Html:
    """An element. In attributes `class_` is class and `text_anchor` text-anchor; those that are None are left out."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_plain(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{told}/>" if name in _VOID else f"<{name}{told}>{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Html:
    """The parts one after the other, those that are not markup escaped."""
    return Html("".join(part if isinstance(part, Html) else html.escape(part) for part in parts))


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> Html:
    """A table, without a head where no heading has text; columns at the places `numbers` are aligned to the right.

    One that is wider than the page can be scrolled from the keyboard.
    """

    def cell(name: str, place: int, text: str) -> Html:
        return tag(name, text, class_="number" if place in numbers else None)

    def row(name: str, texts: Sequence[str]) -> Html:
        return tag("tr", *(cell(name if text else "td", place, text) for place, text in enumerate(texts)))

    body = tag("tbody", *(row("td", texts) for texts in rows))
    head = [tag("thead", row("th", headings))] if any(headings) else []
    return tag("div", tag("table", *head, body), class_="wide", tabindex=0)


def section(name: str, heading: str, *content: str) -> Html:
    """A part of the page that links can name."""
    return tag("section", tag("h2", heading), *content, id=name)


def note(*text: str) -> Html:
    """A paragraph that explains a picture."""
    return tag("p", *text, class_="note")


def badge(text: str) -> Html:
    """A label that says whose time something is."""
    return tag("span", text, class_="badge")


def _plain(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
