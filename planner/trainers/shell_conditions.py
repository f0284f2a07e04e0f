"""Evaluation of shell conditions: true, false, or None where the script does not determine them.

A variable that no line sets is empty. Conditions on files or on the output of a program are None.
"""

from __future__ import annotations

import fnmatch
import operator as op
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tree_sitter import Node

from meshwright.planner.trainers.shell_expansion import Expander, text_of

_NUMBER_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": op.eq,
    "-ne": op.ne,
    "-lt": op.lt,
    "-le": op.le,
    "-gt": op.gt,
    "-ge": op.ge,
}
_TEXT_COMPARISONS: Mapping[str, Callable[[str, str], bool]] = {"<": op.lt, ">": op.gt}
_MAX_MATCHED = 10_000
"""Characters of a text or pattern that is matched; a longer match is undecided, since it could take very long."""


@dataclass(frozen=True)
class ShellConditions:
    """Evaluates conditions. `run_command` interprets a command in a condition, for the variables that it sets, and
    returns True if it is known to succeed; no program is executed."""

    expander: Expander
    run_command: Callable[[Node], bool | None]

    def holds(self, node: Node) -> bool | None:
        """True or False for a condition; None where the script does not determine it."""
        kind = node.type
        if kind == "test_command":
            return self._test(node)
        if kind == "compound_statement" and text_of(node).startswith("(("):
            return self._arithmetic(node)
        if kind == "negated_command":
            return _opposite(self.holds(node.named_children[-1]))
        if kind == "list":
            return self._list(node)
        if kind == "redirected_statement":
            body = node.child_by_field_name("body")
            return None if body is None else self.holds(body)
        return self.run_command(node)

    def matches(self, value: Node, pattern: Node) -> bool | None:
        """True if a value matches a pattern of `case`, or of `==` in double brackets; None where that is undecided."""
        text, pattern_text = self._text(value), self._text(pattern)
        if text is None or pattern_text is None or max(len(text), len(pattern_text)) > _MAX_MATCHED:
            return None
        if pattern.type in ("string", "raw_string"):
            return text == pattern_text
        return fnmatch.fnmatchcase(text, pattern_text)

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

    def _arithmetic(self, node: Node) -> bool | None:
        value = self.expander.number(node)
        return None if value.reasons else value.text != "0"

    def _test(self, node: Node) -> bool | None:
        if text_of(node).startswith("(("):
            return self._arithmetic(node)
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
        text = self._text(node)
        return None if text is None else bool(text)

    def _unary(self, node: Node) -> bool | None:
        operator, operand = text_of(node.named_children[0]), node.named_children[-1]
        if operator == "-v":
            return self.expander.variables.get(text_of(operand)) is not None
        text = self._text(operand)
        if text is None or operator not in ("-z", "-n"):
            return None
        return (text == "") is (operator == "-z")

    def _binary(self, node: Node, is_double: bool) -> bool | None:
        left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
        operator_node = node.child_by_field_name("operator")
        if left is None or right is None or operator_node is None:
            return None
        operator = text_of(operator_node)
        if operator in ("&&", "||", "-a", "-o"):
            is_and = operator in ("&&", "-a")
            sides = self._expression(left, is_double), self._expression(right, is_double)
            if (not is_and) in sides:
                return not is_and
            return None if None in sides else is_and
        if operator in ("=", "==", "!="):
            return self._equality(left, right, operator, is_double=is_double)
        left_text, right_text = self._text(left), self._text(right)
        if left_text is None or right_text is None or operator not in (*_NUMBER_COMPARISONS, *_TEXT_COMPARISONS):
            return None
        return (
            _compare_numbers(_NUMBER_COMPARISONS[operator], left_text, right_text)
            if operator in _NUMBER_COMPARISONS
            else _TEXT_COMPARISONS[operator](left_text, right_text)
        )

    def _equality(self, left: Node, right: Node, operator: str, *, is_double: bool) -> bool | None:
        """Evaluate `=`, `==` or `!=`. None for `[ a = b -a c ]`, which the parser reads differently from a shell."""
        if right.type == "binary_expression":
            return None
        is_equal = self.matches(left, right) if is_double else self._same_text(left, right)
        return _opposite(is_equal) if operator == "!=" else is_equal

    def _same_text(self, left: Node, right: Node) -> bool | None:
        left_text, right_text = self._text(left), self._text(right)
        return None if left_text is None or right_text is None else left_text == right_text

    def _text(self, node: Node) -> str | None:
        return self.expander.word(node).in_empty_environment


def _compare_numbers(compare: Callable[[int, int], bool], left: str, right: str) -> bool | None:
    if not all(re.fullmatch(r"\s*-?\d{1,18}\s*", text) for text in (left, right)):
        return None
    return compare(int(left), int(right))


def _opposite(value: bool | None) -> bool | None:
    return None if value is None else not value
