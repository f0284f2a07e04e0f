"""Capabilities of this machine's device beyond torch's plain operators."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class DeviceCapabilities:
    """The capabilities of a device."""

    kind: str
    """cuda or cpu."""
    capability: tuple[int, int] = (0, 0)
    """CUDA compute capability, major and minor."""
    has_flash: bool = False
    """True if this torch was built with FlashAttention."""
    has_triton: bool = False
    """True if Triton, for which torch.compile generates kernels too, is installed."""

    @property
    def runs_triton(self) -> bool:
        """True if Triton kernels run here; Volta is the first architecture that Triton supports.

        https://docs.pytorch.org/docs/stable/torch.compiler_faq.html
        """
        return self.kind == "cuda" and self.has_triton and self.capability >= (7, 0)


def device_capabilities(kind: str) -> DeviceCapabilities:
    """Return the capabilities of this machine's devices of a kind, cuda or cpu."""
    if kind != "cuda":
        return DeviceCapabilities(kind=kind)
    return DeviceCapabilities(
        kind=kind,
        capability=torch.cuda.get_device_capability(),
        has_flash=torch.backends.cuda.is_flash_attention_available(),
        has_triton=importlib.util.find_spec("triton") is not None,
    )


@functools.cache
def runs_triton_kernels(device: torch.device) -> bool:
    """Return True if Triton kernels run on such a device of this machine."""
    return device_capabilities(device.type).runs_triton
