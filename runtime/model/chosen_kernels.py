"""Which kernels a run computes with, chosen once at its start by what the machine has.

The plain ones are the reference, to which tests hold the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch.distributed as dist

from meshwright.profiles.model_shape import ModelSpec
from meshwright.runtime.device.abilities import Abilities

_FLASH_CAPABILITY = (8, 0)
"""Ampere, the first that FlashAttention-2 runs on; it takes heads of up to 256 numbers, a multiple of 8.
https://github.com/Dao-AILab/flash-attention
"""


@dataclass(frozen=True)
class ChosenKernels:
    """Of training and scoring passes, of prefills and of decode steps."""

    attention: Literal["sdpa", "varlen"] = "sdpa"
    """sdpa: one call of scaled_dot_product_attention for each run of equal rows; varlen: one call of torch's
    variable-length attention for all rows that begin in the pass."""
    operators: Literal["plain", "fused"] = "plain"
    """fused: rotary embedding, SwiGLU and log-probabilities by kernels in Triton, each in one pass."""
    decode: Literal["torch", "paged"] = "torch"
    """paged: decode steps by kernels in Triton that read the cache's blocks where they lie; torch: by its own."""
    overlaps_replicas: bool = False
    """Whether what replicas exchange in training overlaps computing."""

    @property
    def of_one_replica(self) -> ChosenKernels:
        """The same where there is nothing to exchange with others."""
        return replace(self, overlaps_replicas=False)

    @property
    def told(self) -> str:
        """In words."""
        exchanges = "overlap computing" if self.overlaps_replicas else "in one piece"
        own = f"attention {self.attention}, operators {self.operators}, decode {self.decode}"
        return f"{own}, replicas exchange {exchanges}"


PLAIN = ChosenKernels()


def own_kernels(found: Abilities, precision: str, specs: Iterable[ModelSpec]) -> ChosenKernels:
    """What models of these sizes run on, on such a device.

    On a CPU all is plain: torch has no variable-length attention there, and kernels are of a GPU. Exchanges are in one
    piece there: its models would fill one bucket, and of more than two ranks gloo adds in another order where they are
    cut otherwise.
    """
    if found.kind != "cuda":
        return PLAIN
    fits = all(spec.head_dim <= 256 and spec.head_dim % 8 == 0 for spec in specs)
    flash = found.has_flash and found.capability >= _FLASH_CAPABILITY and precision == "bf16" and fits
    return ChosenKernels(
        attention="varlen" if flash else "sdpa",
        operators="fused" if found.runs_triton else "plain",
        decode="paged" if found.runs_triton else "torch",
        overlaps_replicas=True,
    )


def agreed(mine: ChosenKernels) -> ChosenKernels:
    """This rank's where all ranks of the world have the same; the plain ones where devices differ."""
    everyone: list[ChosenKernels] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return mine if all(one == mine for one in everyone) else PLAIN
