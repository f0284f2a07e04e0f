"""A stranger finds a thing by its name: no room is crowded, no name is used twice, nothing is longer than the eye."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable

import pytest

from tests.house.modules import PACKAGES, all_modules, functions, modules

MOST_MODULES = 26
"""Of a folder."""

MOST_LINES, MOST_LINES_OF_A_FUNCTION = 420, 60


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_is_crowded(package: str) -> None:
    inside: dict[str, int] = defaultdict(int)
    for module in modules(package):
        inside[str(module.path.parent)] += 1
    assert {folder: number for folder, number in inside.items() if number > MOST_MODULES} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_is_longer_than_can_be_kept_in_mind(package: str) -> None:
    assert {str(m): len(m.lines) for m in modules(package) if len(m.lines) > MOST_LINES} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_function_fits_the_eye(package: str) -> None:
    lengths = {
        f"{module} {function.name}": (function.end_lineno or 0) - function.lineno + 1
        for module in modules(package)
        for function in functions(module.tree)
    }
    assert {name: number for name, number in lengths.items() if number > MOST_LINES_OF_A_FUNCTION} == {}


def test_no_module_has_the_name_of_another() -> None:
    assert used_twice((module.path.stem, str(module)) for module in all_modules()) == {}


def test_no_class_has_the_name_of_another() -> None:
    classes = ((m, node) for m in all_modules() for node in m.tree.body if isinstance(node, ast.ClassDef))
    assert used_twice((node.name, str(module)) for module, node in classes) == {}


def used_twice(names: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Where each name is that is in several places."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, where in names:
        found[name].append(where)
    return {name: places for name, places in found.items() if len(places) > 1}
