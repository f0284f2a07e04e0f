"""No text of the project holds both sides of a merge."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "cost_models", "docs", "examples", "planner", "profiles", "runtime", "src", "tests")
MARK = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)


def test_no_file_has_the_marks_of_a_merge() -> None:
    every = [
        path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".yaml")
    ]
    every += [path for path in ROOT.iterdir() if path.is_file() and path.suffix in (".md", ".cfg", ".toml", ".txt")]
    assert len(every) > 500
    assert not [path for path in every if MARK.search(path.read_text(encoding="utf-8"))]
