"""Metrics of a run beside metrics.jsonl: TensorBoard event files, and Weights & Biases, where each is installed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol


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
    others = (WeightsAndBiases(out),) if find_spec("wandb") else ()
    return (TensorBoard(out, first_step), *others)


class TensorBoard:
    """Event files. It writes none where the package is missing, which `note` says."""

    def __init__(self, out: Path, first_step: int) -> None:
        """What an earlier run wrote of `first_step` and later ones is hidden."""
        self.note = "no TensorBoard event files; pip install 'meshwright[tensorboard]' for them"
        self._writer: Any = None
        if find_spec("tensorboard") is None:
            return
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - the package may be missing

        path = out / "tensorboard"
        self.note = f"TensorBoard event files go to {path}"
        self._writer = SummaryWriter(str(path), purge_step=first_step or None, flush_secs=10)

    def add(self, group: str, values: Mapping[str, Any], step: int) -> None:
        """Adds every number as `group/name`."""
        if self._writer is None:
            return
        for name, value in _numbers(group, values).items():
            self._writer.add_scalar(name, value, step)

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


def _numbers(group: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among the values, as `group/name`."""
    return {f"{group}/{n}": v for n, v in values.items() if n != "step" and isinstance(v, int | float)}
