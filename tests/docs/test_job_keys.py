"""The page of a job's keys says what the schema says, and every key says what it means."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def generator() -> ModuleType:
    found = importlib.util.spec_from_file_location("job_keys", ROOT / "docs" / "job_keys.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_page_is_what_the_schema_says() -> None:
    written = (ROOT / "docs" / "job.md").read_text(encoding="utf-8")
    assert written == generator().page(), "say: python docs/job_keys.py > docs/job.md"


def test_every_key_says_what_it_means() -> None:
    rows = [line for line in generator().page().splitlines() if line.startswith("| `")]
    assert len(rows) > 150
    assert [row for row in rows if not row.split(" | ")[-1].strip(" |")] == []


def test_no_meaning_hangs_in_the_air() -> None:
    rows = [line for line in generator().page().splitlines() if line.startswith("| `")]
    meanings = [row.split(" | ")[-1].strip(" |") for row in rows]
    assert [one for one in meanings if one.startswith(("of ", "in ", "for which", "whose "))] == []
