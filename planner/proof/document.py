"""The proof of a lower bound as a document: for each search case a tree of cases in depth-first order."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

from pydantic import Field

from meshwright.profiles.documents import Document, VersionedDocument, canonical_json, read_json, write_atomically


class Split(Document):
    """Splits a case by a stage's amount: first the plans in which it is at most `upper_bound`, then the others."""

    stage: str
    amount: str
    upper_bound: float


class Overlap(Document):
    """Splits a case by two stages: first the plans in which their pools have a rank in common, then the others."""

    overlap: tuple[str, str]


class Closed(Document):
    """A case that is not split: no plan of it fits in memory, or every plan takes at least some time."""

    closed_by: Literal["memory", "time"]


Node: TypeAlias = Split | Overlap | Closed


class Tree(Document):
    """The tree of one search case: each node is followed by its first half, then by its second half."""

    steps_ahead: dict[str, int]
    keeps_in_flight: bool
    nodes: tuple[Node, ...]


class Proof(VersionedDocument):
    """The proof that no plan of some facts is faster than `bound_seconds`."""

    remedy: ClassVar[str] = "prove the bound again"

    facts: str = Field(description="SHA-256 of the plan's facts")
    profile: str | None = Field(default=None, description="SHA-256 of the measured table behind the costs")
    cutoff_seconds: float = Field(gt=0, description="the trees leave out choices that are in no plan as fast as this")
    bound_seconds: float = Field(gt=0, description="proven lower bound on the period, at most cutoff_seconds")
    solver_bound_seconds: float = Field(description="lower bound that the solver states, for comparison")
    trees: tuple[Tree, ...]


def read_proof(path: Path) -> Proof:
    """Read a proof from a JSON file. Raises BadInput for anything malformed."""
    return read_json(Proof, path, "proof")


def write_proof(path: Path, proof: Proof) -> None:
    """Write the proof atomically as canonical JSON."""
    write_atomically(path, canonical_json(proof))
