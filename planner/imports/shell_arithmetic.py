"""Arithmetic of a shell script, in whole numbers of 64 bits as the shell has them."""

from __future__ import annotations

import operator as op
import re
from collections.abc import Callable, Mapping

from tree_sitter import Node

_BITS = 63
_DEEPEST = 32
_MOST_DIGITS = 20


class Undecided(Exception):  # noqa: N818 - an answer, not a fault
    """A value that cannot be known from the script, and why."""


def whole_value(node: Node, text_of_name: Callable[[Node | str], str], depth: int = 0) -> int:
    """The number that an expression comes to. `text_of_name` gives the value of a name or an expansion.

    Raises Undecided for what has a part that is not known, and for what is no number.
    """
    if depth > _DEEPEST:
        raise Undecided("an expression is nested too deep")

    def value(part: Node | None) -> int:
        if part is None:
            raise Undecided("an expression is not complete")
        return whole_value(part, text_of_name, depth + 1)

    kind, written = node.type, (node.text or b"").decode(errors="replace")
    if kind in ("arithmetic_expansion", "parenthesized_expression", "compound_statement"):
        inner = [part for part in node.named_children if part.type != "comment"]
        return value(inner[-1] if inner else None)
    if kind == "binary_expression":
        sign = node.child_by_field_name("operator")
        return _applied(
            written, sign, value(node.child_by_field_name("left")), value(node.child_by_field_name("right"))
        )
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
            _number(written, text_of_name, depth) if re.match(r"\d", written) else _named(written, text_of_name, depth)
        )
    if kind in ("simple_expansion", "expansion", "command_substitution", "string", "raw_string", "concatenation"):
        return _number(text_of_name(node), text_of_name, depth)
    raise Undecided(f"$(({written})) is not computed")


def _named(name: str, text_of_name: Callable[[Node | str], str], depth: int) -> int:
    return _number(text_of_name(name), text_of_name, depth)


def _number(text: str, text_of_name: Callable[[Node | str], str], depth: int) -> int:
    """The number in a text, or that of the variable that it names."""
    plain = text.strip()
    if plain == "":
        return 0
    if len(plain) <= _MOST_DIGITS and re.fullmatch(r"[+-]?(0[xX][0-9a-fA-F]+|\d+)", plain):
        sign, digits = (-1 if plain.startswith("-") else 1), plain.lstrip("+-")
        base = 16 if digits[:2].lower() == "0x" else 8 if digits.startswith("0") and len(digits) > 1 else 10
        try:
            return sign * int(digits, base)
        except ValueError:
            raise Undecided(f"{plain} is no number") from None
    if plain.isidentifier() and depth < _DEEPEST:
        return _number(text_of_name(plain), text_of_name, depth + 1)
    raise Undecided(f"{plain[:40]} is no whole number")


def _applied(written: str, sign: Node | None, left: int, right: int) -> int:
    name = (sign.text or b"").decode() if sign else ""
    if name in ("/", "%"):
        if right == 0:
            raise Undecided(f"{written} divides by 0")
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return quotient if name == "/" else left - quotient * right
    if name in ("**", "<<", ">>") and not 0 <= right <= _BITS:
        raise Undecided(f"{written} is beyond the numbers of a shell")
    if name not in _OPERATORS:
        raise Undecided(f"{written} is not computed")
    found = int(_OPERATORS[name](left, right))
    if abs(found) >= 2**_BITS:
        raise Undecided(f"{written} is beyond the numbers of a shell")
    return found


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
