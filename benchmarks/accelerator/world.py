"""Where the parts of the accelerator benchmark measure, at which size, and where they leave what they find."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

CPU = "cpu"

_MEMORY = Path("/dev/shm")
"""Where Linux keeps files in memory."""
_IN_MEMORY = "meshwright-accelerator-"
"""What names of directories there begin with."""
_ROOM = 60 * 10**9
"""Bytes that are free there where a model of 8B, or what two trainers of 0.5B write, is kept in memory."""

_BEGAN = time.monotonic()


@dataclass(frozen=True, kw_only=True)
class World:
    """`device` is a GPU as jobs name it, or cpu: this machine's processor, on which everything is `tiny`."""

    out: Path
    device: str
    tiny: bool

    @property
    def kind(self) -> str:
        """Of the device: cpu or cuda."""
        return CPU if self.device == CPU else "cuda"

    @property
    def in_jobs(self) -> str:
        """The device as jobs name it."""
        return "local" if self.device == CPU else self.device

    @property
    def precision(self) -> str:
        return "fp32" if self.device == CPU else "bf16"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device == CPU else torch.bfloat16

    @property
    def label(self) -> str:
        """Said above every report, so that nobody takes a trial for a figure of a GPU."""
        if self.device == CPU:
            return f"TINY, ON A PROCESSOR, torch {torch.__version__}: a trial of the commands. No figure is of a GPU."
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
        size = "TINY, a trial of the commands: no figure is of a model's real size. " if self.tiny else ""
        return f"{size}{name}, torch {torch.__version__}."

    def directory(self, part: str) -> Path:
        """Where a part keeps its files."""
        found = self.out / part
        found.mkdir(parents=True, exist_ok=True)
        return found

    @contextmanager
    def room(self, part: str) -> Iterator[Path]:
        """An empty directory for files of tens of gigabytes, which go when the part ends: in memory where that has the
        room, else beside the part's others."""
        found = self.directory(part) / "room"
        for left in (found, *(() if self.tiny else _MEMORY.glob(f"{_IN_MEMORY}*"))):  # of parts that were cut off
            shutil.rmtree(left, ignore_errors=True)
        if not self.tiny and _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ROOM:
            found = _MEMORY / f"{_IN_MEMORY}{part}"
        found.mkdir(parents=True)
        try:
            yield found
        finally:
            shutil.rmtree(found, ignore_errors=True)


def tell(line: str) -> None:
    """Says at once how far a part is, with the seconds since its process began: one that is cut off has told it."""
    print(f"[{time.monotonic() - _BEGAN:5.1f} s] {line}", file=sys.stderr, flush=True)
