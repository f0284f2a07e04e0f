"""The list of mutations is of the code as it stands: each applies, is of a folder that needs some, and names a test."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache

import pytest

from tests.house.modules import PACKAGES, ROOT, Function, modules
from tests.mutations.listed import TIERS, Mutation, listed_mutations

LEAST_OF_A_FOLDER = 2

MUTATIONS = listed_mutations()

of_each = pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)


def test_every_mutation_has_a_name_of_its_own_and_says_what_would_go_wrong() -> None:
    assert [name for name, count in Counter(one.name for one in MUTATIONS).items() if count > 1] == []
    assert [one.name for one in MUTATIONS if not (one.kind and one.wrong) or one.tier not in TIERS] == []


def test_every_folder_of_the_packages_has_mutations() -> None:
    folders = {str(module.path.parent) for package in PACKAGES for module in modules(package)}
    of_folders = Counter(one.folder for one in MUTATIONS)
    assert {folder for folder in folders if of_folders[folder] < LEAST_OF_A_FOLDER} == set()
    assert of_folders.keys() - folders == set()


@of_each
def test_a_mutation_changes_one_place_of_its_file_which_stays_python(mutation: Mutation) -> None:
    changed = mutation.mutated((ROOT / mutation.file).read_text(encoding="utf-8"))
    assert changed is not None, f"{mutation.before!r} does not occur once in {mutation.file}; reword the mutation"
    assert mutation.before != mutation.after
    ast.parse(changed)


@of_each
def test_a_mutation_names_a_test_that_there_is_and_that_is_not_slow(mutation: Mutation) -> None:
    path, _, name = mutation.killed_by.partition("::")
    tests = functions_of(path)
    assert name.partition("[")[0] in tests
    marks = " ".join(map(ast.unparse, tests[name.partition("[")[0]].decorator_list))
    assert "slow" not in marks
    assert "pytest.mark.check_all" not in marks


@cache
def functions_of(path: str) -> dict[str, Function]:
    """The functions of a file of tests by name, read but not imported."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, Function)}


def test_few_mutations_need_more_than_the_tests_that_always_run() -> None:
    assert sum(one.tier != "check" for one in MUTATIONS) <= len(MUTATIONS) / 10
