"""Event files of TensorBoard hold what metrics.jsonl holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.runtime.records.boards import Board


def test_numbers_are_found_again_by_group_name_and_step(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = Board(tmp_path, 0)
    for step in range(3):
        board.add("train", {"step": step, "score": 0.5 * step, "scores": (1.0, 2.0)}, step)
    board.close()
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert found.Tags()["scalars"] == ["train/score"]
    assert [(event.step, event.value) for event in found.Scalars("train/score")] == [(0, 0.0), (1, 0.5), (2, 1.0)]


def test_a_run_without_the_package_says_so_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.runtime.records.boards.find_spec", lambda _: None)
    board = Board(tmp_path, 0)
    board.add("train", {"score": 1.0}, 0)
    board.close()
    assert "no TensorBoard event files" in board.note
    assert not list(tmp_path.iterdir())
