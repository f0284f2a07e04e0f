"""Conditions of a shell script: true, false, or not to be known from the script.

A variable that no line sets is empty. What asks for files or for the answer of a program is not known.
"""

from __future__ import annotations

import fnmatch
import operator as op
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tree_sitter import Node

from meshwright.planner.imports.shell_words import Expander, text_of

_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": op.eq,
    "-ne": op.ne,
    "-lt": op.lt,
    "-le": op.le,
    "-gt": op.gt,
    "-ge": op.ge,
}
_TEXTS: Mapping[str, Callable[[str, str], bool]] = {"<": op.lt, ">": op.gt}
_LONGEST = 10_000
"""A text and a pattern that are compared; longer ones are not known, since matching them may take for ever."""


@dataclass(frozen=True)
class ShellConditions:
    """Whether conditions hold. `ran` says it of a command, which it may run for what it sets."""

    expander: Expander
    ran: Callable[[Node], bool | None]

    def holds(self, node: Node) -> bool | None:
        """Whether a condition does; None where the script does not say."""
        kind = node.type
        if kind == "test_command":
            return self._tested(node)
        if kind == "compound_statement" and text_of(node).startswith("(("):
            return self._computed(node)
        if kind == "negated_command":
            return _opposite(self.holds(node.named_children[-1]))
        if kind == "list":
            return self._list(node)
        if kind == "redirected_statement":
            body = node.child_by_field_name("body")
            return None if body is None else self.holds(body)
        return self.ran(node)

    def matches(self, value: Node, pattern: Node) -> bool | None:
        """Whether a value is of a pattern of `case`, or of `==` within double brackets."""
        text, wanted = self._plain(value), self._plain(pattern)
        if text is None or wanted is None or max(len(text), len(wanted)) > _LONGEST:
            return None
        if pattern.type in ("string", "raw_string"):
            return text == wanted
        return fnmatch.fnmatchcase(text, wanted)

    def _list(self, node: Node) -> bool | None:
        left, right = (part for part in node.named_children if part.type != "comment")
        is_and = any(part.type == "&&" for part in node.children)
        first = self.holds(left)
        if first is (not is_and):
            return first
        second = self.holds(right)
        if first is None:
            return second if second is (not is_and) else None
        return second

    def _computed(self, node: Node) -> bool | None:
        found = self.expander.number(node)
        return None if found.reasons else found.text != "0"

    def _tested(self, node: Node) -> bool | None:
        if text_of(node).startswith("(("):
            return self._computed(node)
        inner = [part for part in node.named_children if part.type != "comment"]
        return self._expression(inner[0], text_of(node).startswith("[[")) if len(inner) == 1 else None

    def _expression(self, node: Node, is_double: bool) -> bool | None:
        if node.type == "parenthesized_expression":
            return self._expression(node.named_children[0], is_double)
        if node.type == "negated_command" or (node.type == "unary_expression" and text_of(node).startswith("!")):
            return _opposite(self._expression(node.named_children[-1], is_double))
        if node.type == "unary_expression":
            return self._unary(node)
        if node.type == "binary_expression":
            return self._binary(node, is_double)
        text = self._plain(node)
        return None if text is None else bool(text)

    def _unary(self, node: Node) -> bool | None:
        operator, operand = node.named_children[0], node.named_children[-1]
        sign = text_of(operator)
        if sign == "-v":
            return self.expander.variables.of(text_of(operand)) is not None
        text = self._plain(operand)
        if text is None or sign not in ("-z", "-n"):
            return None
        return (text == "") is (sign == "-z")

    def _binary(self, node: Node, is_double: bool) -> bool | None:
        left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
        sign_node = node.child_by_field_name("operator")
        if left is None or right is None or sign_node is None:
            return None
        sign = text_of(sign_node)
        if sign in ("&&", "||", "-a", "-o"):
            is_and = sign in ("&&", "-a")
            sides = self._expression(left, is_double), self._expression(right, is_double)
            if (not is_and) in sides:
                return not is_and
            return None if None in sides else is_and
        if sign in ("=", "==", "!="):
            return self._alike(left, right, sign, is_double=is_double)
        one, other = self._plain(left), self._plain(right)
        if one is None or other is None or sign not in (*_NUMBERS, *_TEXTS):
            return None
        return _compared(_NUMBERS[sign], one, other) if sign in _NUMBERS else _TEXTS[sign](one, other)

    def _alike(self, left: Node, right: Node, sign: str, *, is_double: bool) -> bool | None:
        """Whether two texts are, or not. The parser takes `[ a = b -a c ]` for another thing than a shell does."""
        if right.type == "binary_expression":
            return None
        found = self.matches(left, right) if is_double else self._is_same(left, right)
        return _opposite(found) if sign == "!=" else found

    def _is_same(self, left: Node, right: Node) -> bool | None:
        one, other = self._plain(left), self._plain(right)
        return None if one is None or other is None else one == other

    def _plain(self, node: Node) -> str | None:
        return self.expander.word(node).in_empty_environment


def _compared(compare: Callable[[int, int], bool], one: str, other: str) -> bool | None:
    if not all(re.fullmatch(r"\s*-?\d{1,18}\s*", text) for text in (one, other)):
        return None
    return compare(int(one), int(other))


def _opposite(found: bool | None) -> bool | None:
    return None if found is None else not found
