"""Event files of TensorBoard and runs of Weights & Biases hold what metrics.jsonl holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.runtime.records.boards import TensorBoard, WeightsAndBiases, open_boards


def test_numbers_are_found_again_by_group_name_and_step(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = TensorBoard(tmp_path, 0)
    for step in range(3):
        board.add("train", {"step": step, "score": 0.5 * step, "scores": (1.0, 2.0)}, step)
    board.close()
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert found.Tags()["scalars"] == ["train/score"]
    assert [(event.step, event.value) for event in found.Scalars("train/score")] == [(0, 0.0), (1, 0.5), (2, 1.0)]


def test_a_run_without_the_package_says_so_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.runtime.records.boards.find_spec", lambda _: None)
    board = TensorBoard(tmp_path, 0)
    board.add("train", {"score": 1.0}, 0)
    board.close()
    assert "no TensorBoard event files" in board.note
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_where_weights_and_biases_is_installed_it_holds_the_numbers_and_sends_them_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    board = WeightsAndBiases(tmp_path)
    board.add("train", {"step": 3, "score": 0.5, "scores": (1.0, 2.0)}, 3)
    board.close()
    [path] = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    written = path.read_bytes()
    assert all(name in written for name in (b"train/score", b"train/step"))
    assert b"train/scores" not in written


def test_there_is_a_board_for_each_package_that_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.runtime.records.boards.find_spec", lambda _: None)
    assert [type(board) for board in open_boards(tmp_path, 0)] == [TensorBoard]
