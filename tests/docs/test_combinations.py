"""The page of what goes together says what the program's rules say."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "combinations.md"


@cache
def combinations() -> ModuleType:
    """The script that writes the page."""
    found = importlib.util.spec_from_file_location("combinations", ROOT / "docs" / "combinations.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["combinations"] = module  # dataclasses look their module up
    found.loader.exec_module(module)
    return module


@pytest.mark.check_all
def test_the_page_is_what_the_rules_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == combinations().page(), (
        "say: python docs/combinations.py > docs/combinations.md"
    )


def test_every_pair_of_features_has_an_answer() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| **")]
    titles = [one.title for one in combinations().FEATURES]
    assert [row.split("**")[1] for row in rows] == titles
    for number, row in enumerate(rows):
        cells = [cell.strip() for cell in row.split("|")[2:-1]]
        assert len(cells) == len(titles)
        assert [place for place, cell in enumerate(cells) if not cell] == [number]
        assert all(cell in ("R", "P", "-") or cell.isdigit() for cell in cells if cell)


def test_a_pair_that_does_not_run_is_refused_by_the_program() -> None:
    rules = combinations()
    assert rules.answer(frozenset(("ppo", "dynamic", "model"))).sentence.startswith(
        "job: workload.dynamic_sampling: algorithm=ppo does not compare the samples of a group"
    )
    assert rules.answer(frozenset(("grpo", "groups", "model"))).outcome == "runs"
