"""Metric writers beside metrics.jsonl: Prometheus always, and TensorBoard, Weights & Biases and MLflow if installed."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from meshwright.profiles.documents import write_without_fsync


class MetricWriter(Protocol):
    """A writer of a run's metrics."""

    note: str
    """Message to the user when the run begins."""

    def add(self, group: str, values: Mapping[str, Any], step: int) -> None:
        """Write every number as `group/name`."""
        ...

    def close(self) -> None:
        """Write whatever is buffered."""
        ...


def open_metric_writers(out: Path, first_step: int) -> tuple[MetricWriter, ...]:
    """Open the writers whose packages are installed; TensorBoard's note says so if its package is missing."""
    installed: list[MetricWriter] = [WeightsAndBiases(out)] if find_spec("wandb") else []
    if find_spec("mlflow") and (find_spec("sqlalchemy") or "MLFLOW_TRACKING_URI" in os.environ):
        installed.append(MLflow(out))  # mlflow-skinny alone cannot store anything locally
    return (TensorBoard(out, first_step), Prometheus(out), *installed)


class TensorBoard:
    """Writes event files; none if the package is missing, which `note` says."""

    def __init__(self, out: Path, first_step: int) -> None:
        """Events of an earlier run from `first_step` on are hidden."""
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
        """Write every number as `group/name`, all in one event; `add_scalar` would write an event for each."""
        if self._writer is None:
            return
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in _numbers(group, values).items()]
        self._writer.file_writer.add_summary(self._summary(value=scalars), step)

    def close(self) -> None:
        """Write whatever is buffered."""
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """Writes to Weights & Biases, in the directory of the run; nothing is uploaded unless WANDB_MODE says so.

    A resumed run is another W&B run of the same group.
    """

    def __init__(self, out: Path) -> None:
        """The W&B run and its group are named after `out`."""
        wandb = import_module("wandb")
        mode = os.environ.get("WANDB_MODE", "offline")
        self.note = f"Weights & Biases ({mode}) writes to {out / 'wandb'}; upload with `wandb sync`"
        settings = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(
            project="meshwright", group=out.name, name=out.name, dir=str(out), mode=mode, settings=settings
        )

    def add(self, group: str, values: Mapping[str, Any], step: int) -> None:
        """Log every number as `group/name`, and the step, which several groups may share, as `group/step`."""
        self._run.log(_numbers(group, values) | {f"{group}/step": step})

    def close(self) -> None:
        """End the W&B run."""
        self._run.finish()


class MLflow:
    """Writes to MLflow, in the directory of the run or at MLFLOW_TRACKING_URI.

    A resumed run is another MLflow run of the same experiment.
    """

    def __init__(self, out: Path) -> None:
        """The MLflow run is named after `out`; the experiment is `meshwright`."""
        client = import_module("mlflow.tracking").MlflowClient
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{out.resolve() / 'mlflow.db'}"
        self.note = f"MLflow writes to {uri}"
        self._client: Any = client(tracking_uri=uri)
        existing = self._client.get_experiment_by_name("meshwright")
        experiment = existing.experiment_id if existing else self._client.create_experiment("meshwright")
        self._run = self._client.create_run(experiment, run_name=out.name).info.run_id

    def add(self, group: str, values: Mapping[str, Any], step: int) -> None:
        """Log every number as `group/name`, all in one call."""
        metric, now = import_module("mlflow.entities").Metric, int(1000 * time.time())  # milliseconds
        metrics = [metric(name, value, now, step) for name, value in _numbers(group, values).items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        """Mark the MLflow run as ended."""
        self._client.set_terminated(self._run)


class Prometheus:
    """Writes the newest numbers to `metrics.prom`, in Prometheus's text format.

    The textfile collector of node_exporter, or any file server, exposes them. The file stays when the run ends; its age
    shows that the run no longer writes.
    """

    def __init__(self, out: Path) -> None:
        """The numbers are labelled with `out`."""
        self._path, self._values = out / "metrics.prom", dict[str, float]()
        self._run = _escaped(str(out.resolve()))
        self.note = f"the newest metrics for Prometheus are in {self._path}"

    def add(self, group: str, values: Mapping[str, Any], step: int) -> None:
        """Replace every number, as `meshwright_group_name`, and the group's step."""
        numbers = _numbers(group, values) | {f"{group}/step": step}
        self._values |= {re.sub(r"[^a-zA-Z0-9_]", "_", f"meshwright_{name}"): value for name, value in numbers.items()}
        lines = (
            f'# TYPE {name} gauge\n{name}{{run="{self._run}"}} {float(value)!r}\n'
            for name, value in sorted(self._values.items())
        )
        write_without_fsync(self._path, "".join(lines))

    def close(self) -> None:
        """Do nothing: every `add` writes the whole file."""


def _escaped(label: str) -> str:
    r"""Return the value of a label with backslash, quote and newline written as \\, \" and \n."""
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _numbers(group: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among the values, named `group/name`, without the step."""
    return {f"{group}/{n}": v for n, v in values.items() if n != "step" and isinstance(v, int | float)}
