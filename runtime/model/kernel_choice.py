"""The choice of kernels of a run, made once at its start from the capabilities of the device.

The plain kernels are the reference that tests compare the others with. The choice is applied in
`runtime.model.attention` and `runtime.model.layers` and, for decode steps and prefills, in
`runtime.inference.decode_step` (on a CPU `runtime.inference.attention`). A layer or a pass that a chosen kernel cannot
compute, for example with capped scores or attention sinks, uses the plain one there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch.distributed as dist

from meshwright.profiles.model_shape import ModelSpec
from meshwright.runtime.device.capabilities import DeviceCapabilities

_FLASH_CAPABILITY = (8, 0)
"""Compute capability of Ampere, the first architecture that FlashAttention-2 runs on.

FlashAttention-2 also needs a head size that is a multiple of 8 and at most `LARGEST_FLASH_HEAD`.
https://github.com/Dao-AILab/flash-attention
"""

LARGEST_FLASH_HEAD = 256
"""Elements of the largest head that FlashAttention-2 computes; heads of a latent cache have more."""


@dataclass(frozen=True)
class ChosenKernels:
    """The kernels of training and scoring passes, of prefills and of decode steps."""

    attention: Literal["sdpa", "varlen"] = "sdpa"
    """sdpa: one call of scaled_dot_product_attention for adjacent rows of equal length; varlen: one call of torch's
    variable-length attention for all rows without cached tokens."""
    operators: Literal["plain", "fused"] = "plain"
    """fused: rotary embedding, SwiGLU and log-probabilities by one Triton kernel each; plain: by torch operators."""
    decode: Literal["torch", "paged"] = "torch"
    """paged: decode steps by Triton kernels that read the cache's blocks in place; torch: by torch operators."""
    overlaps_replicas: bool = False
    """True if gradient reduction and weight gathering between replicas overlap with computation."""

    @property
    def without_overlap(self) -> ChosenKernels:
        """The same kernels without overlap, for a single replica."""
        return replace(self, overlaps_replicas=False)

    @property
    def description(self) -> str:
        """A description for the output of a run."""
        exchanges = "overlap computing" if self.overlaps_replicas else "in one piece"
        kernels = f"attention {self.attention}, operators {self.operators}, decode {self.decode}"
        return f"{kernels}, replicas exchange {exchanges}"


PLAIN = ChosenKernels()


def choose_kernels(capabilities: DeviceCapabilities, precision: str, specs: Iterable[ModelSpec]) -> ChosenKernels:
    """The kernels for models of these shapes on a device with these capabilities.

    On a CPU all are plain: torch has no variable-length attention there, and Triton kernels need a GPU. Gradients are
    not reduced in overlapping buckets there, because the models would fill only one, and because gloo on more than two
    ranks sums in an order that depends on how tensors are split.
    """
    if capabilities.kind != "cuda":
        return PLAIN
    specs = tuple(specs)
    fits = all(spec.head_dim <= LARGEST_FLASH_HEAD and spec.head_dim % 8 == 0 for spec in specs)
    pages = capabilities.runs_triton and all(map(can_read_pages, specs))
    flash = capabilities.has_flash and capabilities.capability >= _FLASH_CAPABILITY and precision == "bf16" and fits
    return ChosenKernels(
        attention="varlen" if flash else "sdpa",
        operators="fused" if capabilities.runs_triton else "plain",
        decode="paged" if pages else "torch",
        overlaps_replicas=True,
    )


def can_read_pages(spec: ModelSpec) -> bool:
    """True if the kernel of decode steps computes the attention of the model.

    A tile of keys as large as a latent vector does not fit in the shared memory of a multiprocessor, and the kernel has
    neither sinks nor chunks, norms after the rotary embedding or queries that grow with their position.
    """
    is_chunked = spec.window is not None and spec.window.chunked
    return not (spec.latent or spec.attention_sinks or is_chunked or spec.rotated_norm or spec.query_growth)


def agree_on_kernels(local: ChosenKernels) -> ChosenKernels:
    """The kernels `local` of this rank if all ranks of the world chose the same, else the plain ones. Collective."""
    per_rank: list[ChosenKernels] = [local] * dist.get_world_size()
    dist.all_gather_object(per_rank, local)
    return local if all(kernels == local for kernels in per_rank) else PLAIN
