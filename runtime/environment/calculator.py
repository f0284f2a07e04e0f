"""The calculator tool: it evaluates an arithmetic expression between `<<` and `>>`, as in Cobbe et al.,
arXiv:2110.14168."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from meshwright.runtime.environment.samples import ToolCall

_MAX_CHARACTERS, _MAX_NUMBER = 200, Fraction(10**15)
"""Largest length of an expression, and largest numerator and denominator of its intermediate values."""

_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculator(calls: Sequence[ToolCall]) -> list[str]:
    """Return the value of each call's last expression, or `error` if it has none."""
    return [_answer(call.sampled.rpartition("<<")[2].removesuffix(">>")) for call in calls]


def _answer(expression: str) -> str:
    try:
        value = _value(ast.parse(expression[:_MAX_CHARACTERS].strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return "error"
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


def _value(node: ast.expr) -> Fraction:
    """Return the value of a node. Raises ValueError for anything but arithmetic, and for numbers that are too large."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _checked(Fraction(str(node.value)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _checked(_OPERATIONS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("no arithmetic")


def _checked(value: Fraction) -> Fraction:
    if abs(value) > _MAX_NUMBER or value.denominator > _MAX_NUMBER:
        raise ValueError("too large")
    return value
