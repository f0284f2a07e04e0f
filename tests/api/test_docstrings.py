"""The examples in the docstrings and on the page about them are what happens."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path

import pytest

from meshwright import api

ROOT = Path(__file__).parents[2]


def failures(name: str, names: dict[str, object], told: str | None) -> int:
    """Runs the examples of one docstring, which see `names` and leave theirs there; what differs is printed."""
    example = doctest.DocTestParser().get_doctest(told or "", names, name, None, None)
    failed = doctest.DocTestRunner(verbose=False).run(example, clear_globs=False).failed
    names |= example.globs
    return failed


def test_every_example_gives_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    assert failures("meshwright.api", names, api.__doc__) == 0
    assert {"api", "facts", "plan"} <= names.keys()
    told = {name: getattr(api, name).__doc__ for name in api.__all__}
    assert [name for name, text in told.items() if failures(name, dict(names), text)] == []
    assert sum(">>>" in (text or "") for text in told.values()) >= 8


def test_the_example_of_the_page_gives_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert failures("docs/api.md", {}, (ROOT / "docs" / "api.md").read_text()) == 0


def test_the_page_names_every_function() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    unnamed = [name for name in api.__all__ if inspect.isfunction(getattr(api, name)) and f"`{name}`" not in text]
    assert unnamed == ["read_plan", "write_plan", "write_table"]
