"""Event files of TensorBoard and runs of Weights & Biases hold what metrics.jsonl holds."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from meshwright.runtime.records.metric_writers import (
    MLflow,
    Prometheus,
    TensorBoard,
    WeightsAndBiases,
    open_metric_writers,
)


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
    monkeypatch.setattr("meshwright.runtime.records.metric_writers.find_spec", lambda _: None)
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
    monkeypatch.setattr("meshwright.runtime.records.metric_writers.find_spec", lambda _: None)
    assert [type(board) for board in open_metric_writers(tmp_path, 0)] == [TensorBoard, Prometheus]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_where_mlflow_is_installed_it_holds_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for _ in range(2):  # a resume is another run of the same experiment
        board = MLflow(tmp_path)
        for step in range(2):
            board.add("train", {"step": step, "score": 0.5 * step, "scores": (1.0, 2.0)}, step)
        board.close()
    client = tracking.MlflowClient(tracking_uri=board.note.removeprefix("MLflow writes to "))
    runs = client.search_runs([client.get_experiment_by_name("meshwright").experiment_id])
    assert [(run.info.run_name, run.info.status) for run in runs] == [(tmp_path.name, "FINISHED")] * 2
    for run in runs:
        assert set(run.data.metrics) == {"train/score"}
        history = client.get_metric_history(run.info.run_id, "train/score")
        assert [(one.step, one.value) for one in history] == [(0, 0.0), (1, 0.5)]


def test_a_step_does_not_wait_for_the_disk_to_take_the_newest_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(os, "fsync", waits.append)
    board = Prometheus(tmp_path)
    board.add("train", {"score": 0.5}, 3)
    board.add("train", {"score": 1.5}, 4)
    assert "meshwright_train_score" in (tmp_path / "metrics.prom").read_text()
    assert not waits


def test_prometheus_finds_the_newest_number_of_every_name(tmp_path: Path) -> None:
    out = tmp_path / 'a "run" \\ of\nmine'
    out.mkdir()
    board = Prometheus(out)
    board.add("train", {"step": 3, "score": 0.5, "scores": (1.0, 2.0), "loss": float("nan")}, 3)
    board.add("held_out", {"step": 3, "mean_score": 1e-9}, 3)
    board.add("train", {"step": 4, "score": -2}, 4)
    board.close()
    text = (out / "metrics.prom").read_text(encoding="utf-8")
    line = r'# TYPE (meshwright_[a-z_]+) gauge\n\1\{run="((?:[^"\\\n]|\\["\\n])*)"\} (\S+)\n'
    assert re.fullmatch(f"(?:{line.replace(chr(92) + '1', '[a-z_]+')})*", text)
    found = {name: float(value) for name, _, value in re.findall(line, text)}
    assert found.pop("meshwright_train_loss") != 0.0
    assert found == {
        "meshwright_held_out_mean_score": 1e-9,
        "meshwright_held_out_step": 3.0,
        "meshwright_train_score": -2.0,
        "meshwright_train_step": 4.0,
    }
    labels = {label for _, label, _ in re.findall(line, text)}
    assert labels == {str(out.resolve()).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")}
