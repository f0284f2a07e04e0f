"""The list of mutations: single faults that an edit could make, each with a test that notices it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutations.yaml")

TIERS = ("check", "all")
"""Tests that a plain `pytest` runs, and those that only `pytest --all` runs too."""


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """`before`, which stands once in `file`, becomes `after`; `killed_by` is the node id of the test that then fails,
    and `wrong` what a user would meet if none did."""

    name: str
    kind: str
    file: str
    before: str
    after: str
    wrong: str
    killed_by: str
    tier: str = "check"

    @property
    def folder(self) -> str:
        return str(Path(self.file).parent)

    def mutated(self, text: str) -> str | None:
        """The text of the file with the fault; None where the mutation does not apply to it."""
        return text.replace(self.before, self.after) if text.count(self.before) == 1 else None


def listed_mutations(path: Path = LIST) -> tuple[Mutation, ...]:
    """All of them, in the order of the list. Raises TypeError for an entry with a key too many or too few."""
    names = {field.name for field in fields(Mutation)}
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert all({*entry} <= names for entry in entries)
    return tuple(Mutation(**entry) for entry in entries)
