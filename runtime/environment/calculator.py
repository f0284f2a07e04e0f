"""A tool that computes: a call is an expression between `<<` and `>>`, as the calculator of Cobbe et al.,
arXiv:2110.14168, has it; the answer is its value."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from meshwright.runtime.environment.samples import ToolCall

_MOST_CHARACTERS, _MOST = 200, Fraction(10**15)
"""Of an expression, and of the numbers on the way to its value."""

_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculator(calls: Sequence[ToolCall]) -> list[str]:
    """The value of each call's last expression, or `error` where it has none."""
    return [_answer(call.drawn.rpartition("<<")[2].removesuffix(">>")) for call in calls]


def _answer(expression: str) -> str:
    try:
        value = _value(ast.parse(expression[:_MOST_CHARACTERS].strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return "error"
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


def _value(node: ast.expr) -> Fraction:
    """Raises ValueError for what is no arithmetic, and for numbers that are too large."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _within(Fraction(str(node.value)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _within(_OPERATIONS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("no arithmetic")


def _within(value: Fraction) -> Fraction:
    if abs(value) > _MOST or value.denominator > _MOST:
        raise ValueError("too large")
    return value
