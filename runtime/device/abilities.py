"""What the device of this machine can run beside torch's plain operators."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """Of a device."""

    kind: str
    """cuda or cpu."""
    capability: tuple[int, int] = (0, 0)
    """CUDA's, major and minor."""
    has_flash: bool = False
    """Whether this torch was built with FlashAttention."""
    has_triton: bool = False
    """Whether what torch.compile writes for a GPU can be compiled."""


def abilities(kind: str) -> Abilities:
    """Those of this machine's devices of a kind, cuda or cpu."""
    if kind != "cuda":
        return Abilities(kind=kind)
    return Abilities(
        kind=kind,
        capability=torch.cuda.get_device_capability(),
        has_flash=torch.backends.cuda.is_flash_attention_available(),
        has_triton=importlib.util.find_spec("triton") is not None,
    )
