"""Tests run the modules that lie beside them, and not others that are installed: mutations are tried in a copy."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = ("profiles", "cost_models", "planner", "runtime", "api")

WHERE = (
    "import importlib.util; "
    f"print(*(importlib.util.find_spec(f'meshwright.{{name}}').origin for name in {PACKAGES}), sep='\\n')"
)


def test_modules_are_those_beside_the_tests() -> None:
    origins = [str(getattr(importlib.util.find_spec(f"meshwright.{name}"), "origin", None)) for name in PACKAGES]
    assert {Path(origin).resolve().is_relative_to(ROOT) for origin in origins} == {True}


def test_modules_of_processes_are_those_beside_the_tests(tmp_path: Path) -> None:
    """Wherever they are started."""
    there = subprocess.run(
        [sys.executable, "-c", WHERE], cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=True
    )
    assert {Path(origin).resolve().is_relative_to(ROOT) for origin in there.stdout.split()} == {True}
