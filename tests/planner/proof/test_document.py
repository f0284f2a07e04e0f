"""A proof is read as it was written, and what is no proof is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.proof.document import Closed, Overlap, Proof, Split, Tree, read_proof, write_proof
from meshwright.profiles.errors import BadInput

PROOF = Proof(
    facts="0",
    cutoff_seconds=2.5,
    bound_seconds=2.5,
    solver_bound_seconds=3.0,
    trees=(
        Tree(
            steps_ahead={"actor_generate": 0},
            keeps_in_flight=False,
            nodes=(
                Split(stage="actor_train", amount="ranks", upper_bound=3.0),
                Closed(closed_by="memory"),
                Overlap(overlap=("actor_train", "critic_train")),
                Closed(closed_by="time"),
                Closed(closed_by="time"),
            ),
        ),
    ),
)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_proof(tmp_path / "proof.json", PROOF)
    assert read_proof(tmp_path / "proof.json") == PROOF


def test_what_is_no_proof_is_told(tmp_path: Path) -> None:
    (tmp_path / "proof.json").write_text('{"schema_version": 3}')
    with pytest.raises(BadInput, match="missing key 'facts'; add it"):
        read_proof(tmp_path / "proof.json")
