"""The modules of the four packages, read but not imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).parents[2]

PACKAGES = ("profiles", "cost_models", "planner", "runtime")

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One file: its path from the root of the repository, and its text."""

    path: Path
    text: str

    def __str__(self) -> str:
        return str(self.path)

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


@cache
def modules(package: str) -> tuple[Module, ...]:
    """The modules of a package; what says what a folder is for (`__init__.py`) is none."""
    paths = (path for path in sorted((ROOT / package).rglob("*.py")) if path.name != "__init__.py")
    return tuple(Module(path.relative_to(ROOT), path.read_text(encoding="utf-8")) for path in paths)


def all_modules() -> tuple[Module, ...]:
    """Those of all packages."""
    return tuple(module for package in PACKAGES for module in modules(package))


def functions(tree: ast.AST) -> Iterator[Function]:
    """Every function and method, however deep."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))
