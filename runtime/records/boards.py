"""Metrics of a run beside metrics.jsonl: a text file for Prometheus, and where it is installed TensorBoard, Weights &
Biases, MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from meshwright.profiles.documents import write_newest


class Board(Protocol):
    """Takes the numbers of a run as they come."""

    note: str
    """What a user is told of it when the run begins."""

    def add(self, group: str, values: Mapping[str, Any], step: int) -> None:
        """Adds every number as `group/name`."""
        ...

    def close(self) -> None:
        """Writes what is left."""
        ...


def open_boards(out: Path, first_step: int) -> tuple[Board, ...]:
    """Those whose packages are installed; TensorBoard's is there in any case and says where it is missing."""
    installed: list[Board] = [WeightsAndBiases(out)] if find_spec("wandb") else []
    if find_spec("mlflow") and (find_spec("sqlalchemy") or "MLFLOW_TRACKING_URI" in os.environ):
        installed.append(MLflow(out))  # mlflow-skinny alone can keep nothing on this machine
    return (TensorBoard(out, first_step), Prometheus(out), *installed)


class TensorBoard:
    """Event files. It writes none where the package is missing, which `note` says."""

    def __init__(self, out: Path, first_step: int) -> None:
        """What an earlier run wrote of `first_step` and later ones is hidden."""
        self.note = "no TensorBoard event files; pip install 'meshwright[tensorboard]' for them"
        self._writer: Any = None
        self._summary: Any = None
        if find_spec("tensorboard") is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415 - the package may be missing
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

        self._summary, path = Summary, out / "tensorboard"
        self.note = f"TensorBoard event files go to {path}"
        self._writer = SummaryWriter(str(path), purge_step=first_step or None, flush_secs=10)

    def add(self, group: str, values: Mapping[str, Any], step: int) -> None:
        """Adds every number as `group/name`, all in one event: by `add_scalar` each would be one of its own."""
        if self._writer is None:
            return
        found = [self._summary.Value(tag=name, simple_value=value) for name, value in _numbers(group, values).items()]
        self._writer.file_writer.add_summary(self._summary(value=found), step)

    def close(self) -> None:
        """Writes what is left."""
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases in the directory of the run; nothing leaves the machine unless WANDB_MODE says so.

    A run that is resumed is another run of the same group there.
    """

    def __init__(self, out: Path) -> None:
        """Names the run and its group after `out`."""
        wandb = import_module("wandb")
        mode = os.environ.get("WANDB_MODE", "offline")
        self.note = f"Weights & Biases ({mode}) writes to {out / 'wandb'}; upload with `wandb sync`"
        settings = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(
            project="meshwright", group=out.name, name=out.name, dir=str(out), mode=mode, settings=settings
        )

    def add(self, group: str, values: Mapping[str, Any], step: int) -> None:
        """Adds every number as `group/name`, and the step, which several groups may share, as `group/step`."""
        self._run.log(_numbers(group, values) | {f"{group}/step": step})

    def close(self) -> None:
        """Writes what is left."""
        self._run.finish()


class MLflow:
    """A run of MLflow in the directory of the run, or where MLFLOW_TRACKING_URI says.

    A run that is resumed is another run of the same experiment there.
    """

    def __init__(self, out: Path) -> None:
        """Names the experiment and its run after `out`."""
        client = import_module("mlflow.tracking").MlflowClient
        place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{out.resolve() / 'mlflow.db'}"
        self.note = f"MLflow writes to {place}"
        self._client: Any = client(tracking_uri=place)
        known = self._client.get_experiment_by_name("meshwright")
        experiment = known.experiment_id if known else self._client.create_experiment("meshwright")
        self._run = self._client.create_run(experiment, run_name=out.name).info.run_id

    def add(self, group: str, values: Mapping[str, Any], step: int) -> None:
        """Adds every number as `group/name`, all in one call."""
        metric, now = import_module("mlflow.entities").Metric, int(1000 * time.time())  # milliseconds
        found = [metric(name, value, now, step) for name, value in _numbers(group, values).items()]
        self._client.log_batch(self._run, metrics=found)

    def close(self) -> None:
        """Says that the run has ended."""
        self._client.set_terminated(self._run)


class Prometheus:
    """The newest numbers in `metrics.prom`, in Prometheus's text format: the textfile collector of node_exporter, or
    any server of files, hands them on. The file stays when the run ends; how old it is tells so."""

    def __init__(self, out: Path) -> None:
        """The numbers are labelled with `out`."""
        self._path, self._values = out / "metrics.prom", dict[str, float]()
        self._run = _escaped(str(out.resolve()))
        self.note = f"the newest metrics for Prometheus are in {self._path}"

    def add(self, group: str, values: Mapping[str, Any], step: int) -> None:
        """Replaces every number, as `meshwright_group_name`, and the group's step."""
        found = _numbers(group, values) | {f"{group}/step": step}
        self._values |= {re.sub(r"[^a-zA-Z0-9_]", "_", f"meshwright_{name}"): value for name, value in found.items()}
        lines = (
            f'# TYPE {name} gauge\n{name}{{run="{self._run}"}} {float(value)!r}\n'
            for name, value in sorted(self._values.items())
        )
        write_newest(self._path, "".join(lines))

    def close(self) -> None:
        """Nothing is left to write."""


def _escaped(label: str) -> str:
    r"""The value of a label: a backslash, a quote and a line's end are written \\, \" and \n."""
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _numbers(group: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among the values, as `group/name`."""
    return {f"{group}/{n}": v for n, v in values.items() if n != "step" and isinstance(v, int | float)}
