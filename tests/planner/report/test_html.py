"""Markup: text is escaped wherever it enters, and only text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.report.html import join, table, tag
from tests.planner.report.pages import Outline

HOSTILE = "<script>alert('\"&')</script>"


def test_text_is_escaped_and_markup_is_not() -> None:
    assert tag("p", "a < b", tag("b", "c & d")) == "<p>a &lt; b<b>c &amp; d</b></p>"
    assert tag("rect", title=HOSTILE, class_="x", text_anchor="end", id=None) == (
        '<rect title="&lt;script&gt;alert(&#x27;&quot;&amp;&#x27;)&lt;/script&gt;" class="x" text-anchor="end"/>'
    )


@given(st.text())
def test_any_text_is_read_back_as_it_was(text: str) -> None:
    outline = Outline(join([tag("p", text, title=text)]))
    assert outline.names == ["p"]
    assert "".join(outline.text) == text
    assert outline.attributes == [("title", text)]


def test_a_table_without_headings_has_no_head() -> None:
    assert "thead" not in Outline(table(("", ""), [("a", HOSTILE)])).names
    assert Outline(table(("x",), [(HOSTILE,)])).names == ["div", "table", "thead", "tr", "th", "tbody", "tr", "td"]
