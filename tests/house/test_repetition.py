"""Nothing is written twice: whoever changes one of two equal pieces forgets the other."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from tests.house.modules import Module, all_modules

NUM_LINES = 6
"""So many lines of code, one behind the other, are a piece."""


def test_no_piece_of_code_stands_twice() -> None:
    found: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for module in all_modules():
        lines = list(code_of(module))
        for first in range(len(lines) - NUM_LINES + 1):
            piece = lines[first : first + NUM_LINES]
            found[tuple(text for _, text in piece)].append(f"{module}:{piece[0][0]}")
    assert [places for places in found.values() if len(places) > 1] == []


def code_of(module: Module) -> Iterator[tuple[int, str]]:
    """Number and text of the lines that say something: no imports, no docstrings, no comments, no brackets alone."""
    silent = {number for node in ast.walk(module.tree) if _says_nothing(node) for number in _lines_of(node)}
    for number, line in enumerate(module.lines, start=1):
        text = " ".join(line.partition("  # ")[0].split())
        if number not in silent and re.search(r"\w", text) and not text.startswith("#"):
            yield number, text


def _says_nothing(node: ast.AST) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return is_text or isinstance(node, ast.Import | ast.ImportFrom)


def _lines_of(node: ast.AST) -> range:
    assert isinstance(node, ast.stmt)
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)
