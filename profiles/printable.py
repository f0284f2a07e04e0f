"""Escaping of untrusted text for terminals: control characters become visible escapes."""

from __future__ import annotations

import re

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters except tabs and newlines, and characters that change the direction of text."""


def printable(text: str) -> str:
    """Return the text with control characters as escapes, such as `\\x1b` for the one that starts terminal commands."""
    return _HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def has_control_characters(text: str) -> bool:
    """True if the text has control characters that a terminal would interpret."""
    return _HIDDEN.search(text) is not None
