"""Evaluation of shell arithmetic, in integers of 64 bits as in bash."""

from __future__ import annotations

import operator as op
import re
from collections.abc import Callable, Mapping

from tree_sitter import Node

_BITS = 63
_MAX_DEPTH = 32
_MAX_DIGITS = 20


class Undecided(Exception):  # noqa: N818 - an answer, not a fault
    """Raised for a value that the script does not determine, with the reason."""


def evaluate_arithmetic(node: Node, text_of_name: Callable[[Node | str], str], depth: int = 0) -> int:
    """The value of an arithmetic expression. `text_of_name` gives the text of a name or an expansion.

    Raises Undecided for an expression with an unknown part, and for text that is not a number.
    """
    if depth > _MAX_DEPTH:
        raise Undecided("an expression is nested too deep")

    def value(part: Node | None) -> int:
        if part is None:
            raise Undecided("an expression is not complete")
        return evaluate_arithmetic(part, text_of_name, depth + 1)

    kind, written = node.type, (node.text or b"").decode(errors="replace")
    if kind in ("arithmetic_expansion", "parenthesized_expression", "compound_statement"):
        inner = [part for part in node.named_children if part.type != "comment"]
        return value(inner[-1] if inner else None)
    if kind == "binary_expression":
        sign = node.child_by_field_name("operator")
        return _apply(written, sign, value(node.child_by_field_name("left")), value(node.child_by_field_name("right")))
    if kind == "ternary_expression":
        part = "consequence" if value(node.child_by_field_name("condition")) else "alternative"
        return value(node.child_by_field_name(part))
    if kind == "unary_expression":
        inner_value = value(node.named_children[-1])
        sign_text = written[: 2 if written.startswith(("++", "--")) else 1]
        return {"-": -inner_value, "+": inner_value, "!": int(not inner_value), "~": ~inner_value}.get(
            sign_text, inner_value
        )
    if kind in ("number", "word", "variable_name"):
        return (
            _number(written, text_of_name, depth)
            if re.match(r"\d", written)
            else _variable_value(written, text_of_name, depth)
        )
    if kind in ("simple_expansion", "expansion", "command_substitution", "string", "raw_string", "concatenation"):
        return _number(text_of_name(node), text_of_name, depth)
    raise Undecided(f"$(({written})) is not computed")


def _variable_value(name: str, text_of_name: Callable[[Node | str], str], depth: int) -> int:
    return _number(text_of_name(name), text_of_name, depth)


def _number(text: str, text_of_name: Callable[[Node | str], str], depth: int) -> int:
    """The number in a text, or the value of the variable that it names."""
    stripped = text.strip()
    if stripped == "":
        return 0
    if len(stripped) <= _MAX_DIGITS and re.fullmatch(r"[+-]?(0[xX][0-9a-fA-F]+|\d+)", stripped):
        sign, digits = (-1 if stripped.startswith("-") else 1), stripped.lstrip("+-")
        base = 16 if digits[:2].lower() == "0x" else 8 if digits.startswith("0") and len(digits) > 1 else 10
        try:
            return sign * int(digits, base)
        except ValueError:
            raise Undecided(f"{stripped} is not a number") from None
    if stripped.isidentifier() and depth < _MAX_DEPTH:
        return _number(text_of_name(stripped), text_of_name, depth + 1)
    raise Undecided(f"{stripped[:40]} is not a whole number")


def _apply(written: str, operator: Node | None, left: int, right: int) -> int:
    name = (operator.text or b"").decode() if operator else ""
    if name in ("/", "%"):
        if right == 0:
            raise Undecided(f"{written} divides by 0")
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return quotient if name == "/" else left - quotient * right
    if name in ("**", "<<", ">>") and not 0 <= right <= _BITS:
        raise Undecided(f"{written} is beyond the 64-bit integers of a shell")
    if name not in _OPERATORS:
        raise Undecided(f"{written} is not computed")
    result = int(_OPERATORS[name](left, right))
    if abs(result) >= 2**_BITS:
        raise Undecided(f"{written} is beyond the 64-bit integers of a shell")
    return result


_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "+": op.add,
    "-": op.sub,
    "*": op.mul,
    "**": op.pow,
    "<<": op.lshift,
    ">>": op.rshift,
    "&": op.and_,
    "|": op.or_,
    "^": op.xor,
    "==": op.eq,
    "!=": op.ne,
    "<": op.lt,
    "<=": op.le,
    ">": op.gt,
    ">=": op.ge,
    "&&": lambda left, right: bool(left and right),
    "||": lambda left, right: bool(left or right),
}
