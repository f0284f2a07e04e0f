"""How one stage runs on its layout: micro-batches, recomputation, generation slots."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from meshwright.profiles.errors import BadInput


class Recompute(StrEnum):
    """Which activations a training stage drops and computes again in the backward pass."""

    NONE = "none"
    SELECTIVE = "selective"  # core attention only
    FULL = "full"  # whole layers


@dataclass(frozen=True, order=True, kw_only=True)
class Schedule:
    """`micro_batch_size` counts sequences per data-parallel replica.

    `generation_slots` counts sequences in flight per data-parallel replica; it is 0 for stages that do not generate.
    """

    micro_batch_size: int = 1
    recompute: Recompute = Recompute.NONE
    generation_slots: int = 0

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1:
            raise BadInput(f"micro_batch_size={self.micro_batch_size} must be 1 or more.")
        if self.generation_slots < 0:
            raise BadInput(f"generation_slots={self.generation_slots} must be 0 or more.")
