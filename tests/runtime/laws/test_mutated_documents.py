"""Whatever became of a file, the command that reads it ends in time, in a sentence, and writes where it may."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.survival import documents, hostile_world

FILES = 2000


@pytest.mark.check_all
def test_every_kind_of_file_may_be_mutated_and_is_survived(tmp_path: Path) -> None:
    hostile_world.write(tmp_path / "world")
    kinds = hostile_world.kinds(tmp_path / "world")
    tried = documents.measure(tmp_path / "world", tmp_path / "kept", number=FILES, num_workers=2)
    assert tried.findings == ()
    assert sum(tried.numbers.values()) == FILES
    assert len(tried.numbers) == len(kinds) >= 30
    assert all(tried.refused[kind.name] > 0 for kind in kinds)
