"""Where the parts of the accelerator benchmark measure, at which size, and where they leave what they find."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

CPU = "cpu"


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
