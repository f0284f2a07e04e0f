"""Texts that a shell and YAML read as the settings that they were."""

from __future__ import annotations

import subprocess

import yaml

from meshwright.planner.trainers.export_settings import flags, nested_yaml, overrides, script
from meshwright.planner.trainers.trainer import KeyValue

FOUND = (
    KeyValue("a.b", 2, "layout.tp"),
    KeyValue("a.c.path", "models/it's here", "job"),
    KeyValue("is_on", True, "rule"),
    KeyValue("is_off", False, "rule"),
    KeyValue("none", None, "rule"),
)


def arguments(text: str) -> list[str]:
    """What the command of a script is given."""
    done = subprocess.run(["bash", "-c", text, "script", "more"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_overrides_come_to_the_command_as_they_are() -> None:
    text = script("two\nlines", "printf '%s\\n'", overrides(FOUND))
    assert arguments(text) == ["a.b=2", "a.c.path=models/it's here", "is_on=true", "is_off=false", "none=null", "more"]
    assert "# two\n# lines\n" in text
    assert "a.b=2  # layout.tp\n" in text


def test_flags_come_to_the_command_where_they_are_set() -> None:
    text = script("", "printf '%s\\n'", flags(FOUND))
    assert arguments(text) == ["--a.b", "2", "--a.c.path", "models/it's here", "--is_on", "more"]


def test_nested_settings_are_read_back() -> None:
    text = nested_yaml(FOUND)
    expected = {"a": {"b": 2, "c": {"path": "models/it's here"}}, "is_on": True, "is_off": False, "none": None}
    assert yaml.safe_load(text) == expected
    assert "  b: 2  # layout.tp\n" in text
