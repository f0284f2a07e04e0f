"""The proof of a bound, as a document: for every scope a tree of cases, the nodes in the order of reading."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import Field

from meshwright.profiles.documents import Document, canonical_json, read_json, write_atomically


class Split(Document):
    """The plans in which a stage has so much of an amount at most, which follow first, and the others."""

    stage: str
    amount: str
    most: float


class Meeting(Document):
    """The plans in which the pools of two stages have a rank in common, which follow first, and the others."""

    meet: tuple[str, str]


class Closed(Document):
    """A case without cases below: no plan of it fits the memory, or all of them take their time."""

    closed_by: Literal["memory", "time"]


Node: TypeAlias = Split | Meeting | Closed


class Tree(Document):
    """The cases of one scope: all of its plans, then those of each node before those beside it."""

    ahead: dict[str, int]
    runs_on: bool
    nodes: tuple[Node, ...]


class Proof(Document):
    """What no plan of some facts is faster than, and why."""

    schema_version: Literal[2] = 2
    facts: str = Field(description="SHA-256 of the plan's facts")
    profile: str | None = Field(default=None, description="SHA-256 of the measured table behind the costs")
    within_seconds: float = Field(gt=0, description="choices that are in no plan so fast are in no tree")
    bound_seconds: float = Field(gt=0, description="what the trees prove of plans so fast, and these seconds at most")
    solver_bound_seconds: float = Field(description="what the solver says, for comparison")
    trees: tuple[Tree, ...]


def read_proof(path: Path) -> Proof:
    """The proof in a JSON file. Raises BadInput for anything malformed."""
    return read_json(Proof, path, "proof")


def write_proof(path: Path, proof: Proof) -> None:
    """Writes the canonical bytes."""
    write_atomically(path, canonical_json(proof))
