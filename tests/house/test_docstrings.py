"""What is public says what it is, which shapes its tensors have, and which errors it raises."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.house.modules import PACKAGES, Function, modules

_SHAPE = re.compile(r"\[[^\]]*\]")

_NO_MISTAKE = ("AssertionError", "NotImplementedError")
"""Of ours, and not what a caller is told of."""


class Public(NamedTuple):
    """A function, method or class that has no underscore in front, nor is in a class with one, and what is said of it:
    its own docstring, those of the classes around it, and that of the module."""

    name: str
    node: Function | ast.ClassDef
    own: str
    around: str
    module: str

    @property
    def is_method(self) -> bool:
        return isinstance(self.node, Function) and "." in self.name.rpartition(" ")[2]


def publics(package: str) -> Iterator[Public]:
    """Those of a package, methods included."""
    for module in modules(package):
        tree = module.tree
        yield from _inside(tree, f"{module} ", "", ast.get_docstring(tree) or "")


def _inside(node: ast.Module | ast.ClassDef, prefix: str, around: str, module: str) -> Iterator[Public]:
    for inner in node.body:
        if isinstance(inner, Function | ast.ClassDef) and not inner.name.startswith("_"):
            own = ast.get_docstring(inner) or ""
            yield Public(prefix + inner.name, inner, own, around, module)
            if isinstance(inner, ast.ClassDef):
                yield from _inside(inner, f"{prefix}{inner.name}.", f"{around} {own}", module)


@pytest.mark.parametrize("package", PACKAGES)
def test_who_takes_or_gives_tensors_tells_their_shapes(package: str) -> None:
    tensors = (public for public in publics(package) if isinstance(public.node, Function) and has_tensors(public.node))
    assert [p.name for p in tensors if not _SHAPE.search(f"{p.own} {p.around} {p.module}")] == []


def has_tensors(function: Function) -> bool:
    """Whether a tensor is among what a function takes or returns."""
    arguments = function.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
    annotations = (*(argument.annotation for argument in every if argument), function.returns)
    return any(annotation and re.search(r"\bTensor\b", ast.unparse(annotation)) for annotation in annotations)


@pytest.mark.parametrize("package", PACKAGES)
def test_who_raises_an_error_names_it(package: str) -> None:
    """A command tells its errors on the command line, where its docstring is its help."""
    silent = [
        f"{public.name} raises {error}"
        for public in publics(package)
        if isinstance(public.node, Function) and not is_command(public.node)
        for error in sorted(raised(public.node))
        if not re.search(rf"\b[Rr]aises\b[^.]*\b{error}\b", f"{public.own} {public.around}")
    ]
    assert silent == []


def is_command(function: Function) -> bool:
    """Whether a function's arguments are those of a command line."""
    return "typer." in ast.unparse(function.args)


def raised(function: Function) -> set[str]:
    """The errors that a function's own body raises by name."""
    found = set()
    for node in _own_nodes(function):
        if isinstance(node, ast.Raise) and node.exc:
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if isinstance(error, ast.Name) and error.id[0].isupper() and error.id not in _NO_MISTAKE:
                found.add(error.id)
    return found


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """Everything in a function but what is in functions and classes inside it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            yield node
            waiting += ast.iter_child_nodes(node)
