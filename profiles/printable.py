"""Text that anybody may have written, as a terminal may be given it: what would move its cursor is written out."""

from __future__ import annotations

import re

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters but for tabs and ends of lines, and those that turn the direction of a text."""


def printable(text: str) -> str:
    """The text with every such character as an escape, `\\x1b` for the one that begins a terminal's commands."""
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def has_hidden(text: str) -> bool:
    """Whether a text has such a character."""
    return _HIDDEN.search(text) is not None
