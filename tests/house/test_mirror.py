"""Tests lie where what they test lies: every module has its namesake test, and every test its namesake module."""

from __future__ import annotations

import ast

import pytest

from tests.house.modules import PACKAGES, ROOT, Function, Module, functions, modules

LAWS = "laws"
"""Folders of tests about several modules at once."""


@pytest.mark.parametrize("package", PACKAGES)
def test_every_test_has_its_module(package: str) -> None:
    tests = (path.relative_to(ROOT / "tests") for path in (ROOT / "tests" / package).rglob("test_*.py"))
    own = (path for path in tests if path.parent.name != LAWS)
    assert [str(path) for path in own if not (ROOT / path.with_name(path.name.removeprefix("test_"))).exists()] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_has_its_test(package: str) -> None:
    """But for those that only declare: there is nothing that they do."""
    doing = (module.path for module in modules(package) if not declares_only(module))
    assert [str(path) for path in doing if not (ROOT / "tests" / path.with_name(f"test_{path.name}")).exists()] == []


def declares_only(module: Module) -> bool:
    """Whether no function of a module has anything to do."""
    lambdas = any(isinstance(node, ast.Lambda) for node in ast.walk(module.tree))
    return not lambdas and all(map(says_nothing, functions(module.tree)))


def says_nothing(function: Function) -> bool:
    """Whether a body is a docstring or `...`, as in a protocol."""
    return all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in function.body)
