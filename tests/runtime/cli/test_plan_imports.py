"""The command `plan` imports what every search needs, and no more."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import meshwright.runtime.cli.plan, meshwright.planner.solver.solve
print("\\n".join(sys.modules))
"""

MAX_MODULES, MAX_OWN_MODULES = 650, 148
"""Limits a little above the numbers of modules on Python 3.11: 633, and 136 of them of this program."""


@pytest.fixture(scope="module")
def imported() -> list[str]:
    """The modules that a fresh process has after the imports of a search."""
    return subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(
    "package",
    [
        "pandas",
        "torch",
        "megatron",
        "transformers",
        "tokenizers",
        "networkx",
        "pyarrow",
        "plotly",
        "tensorboard",
        "meshwright.planner.trainers",
        "meshwright.planner.proof",
        "meshwright.planner.simulation",
        "meshwright.planner.program",
        "meshwright.planner.report.report",
        "meshwright.planner.analysis.replan",
        "meshwright.profiles.trace",
        "meshwright.runtime.records.record",
        "meshwright.runtime.execution",
    ],
)
def test_a_search_does_not_import(package: str, imported: list[str]) -> None:
    assert [name for name in imported if name == package or name.startswith(f"{package}.")] == []


def test_a_search_imports_few_modules(imported: list[str]) -> None:
    assert len(imported) <= MAX_MODULES
    assert sum(name.startswith("meshwright") for name in imported) <= MAX_OWN_MODULES
