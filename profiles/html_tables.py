"""HTML tables with which documents show themselves in a notebook; every text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def html_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with these headings, whose first column has the names of the rows."""
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = "".join(f"<tr>{_row(row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_paragraphs(sentences: Iterable[str]) -> str:
    """Return each sentence as a paragraph."""
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


def _row(cells: Sequence[str]) -> str:
    name, *others = cells
    return f'<th scope="row">{escape(name)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in others)
