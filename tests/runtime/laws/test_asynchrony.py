"""Delays of ranks and messages change nothing that is learned, where scores are streamed from two replicas too."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.survival.asynchrony import LAYOUTS, learned
from benchmarks.survival.job import write_models


@pytest.mark.check_all
def test_delays_change_nothing_that_is_learned(tmp_path: Path) -> None:
    write_models(tmp_path)
    one, other = (learned(tmp_path, LAYOUTS[-1], 1, seed=seed) for seed in (1, 2))
    assert one.drawn == other.drawn
    assert one.digest == other.digest
