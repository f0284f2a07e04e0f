"""What the device of this machine can run beside torch's plain operators."""

from __future__ import annotations

import functools
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
    """Whether kernels in Triton, in which torch.compile writes too, can be compiled."""

    @property
    def runs_triton(self) -> bool:
        """Volta is the first that it compiles for: https://docs.pytorch.org/docs/stable/torch.compiler_faq.html"""
        return self.kind == "cuda" and self.has_triton and self.capability >= (7, 0)


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


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether kernels in Triton run on such a device of this machine."""
    return abilities(device.type).runs_triton
