"""Metrics of a run as event files of TensorBoard, beside metrics.jsonl, where the tensorboard package is installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_DIRECTORY = "tensorboard"


class Board:
    """Scalars by step. It writes nothing where the package is missing, which `note` says."""

    def __init__(self, out: Path, first_step: int) -> None:
        """What an earlier run wrote of `first_step` and later ones is hidden."""
        self.note = "no TensorBoard event files; pip install 'meshwright[tensorboard]' for them"
        self._writer: Any = None
        if find_spec("tensorboard") is None:
            return
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - the package may be missing

        path = out / _DIRECTORY
        self.note = f"TensorBoard event files go to {path}"
        self._writer = SummaryWriter(str(path), purge_step=first_step or None, flush_secs=10)

    def add(self, group: str, values: Mapping[str, Any], step: int) -> None:
        """Adds every number as `group/name`."""
        if self._writer is None:
            return
        for name, value in values.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        """Writes what is left."""
        if self._writer is not None:
            self._writer.close()
