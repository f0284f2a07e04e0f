"""Megatron's distributed optimizer as the trainers here use it."""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor


class PaddedOptimizer(DistributedOptimizer):
    """Gathers the state of a buffer for a checkpoint with the room that stands between its buckets.

    Megatron leaves it out, and then looks for each parameter where it would be with it: what comes behind a bucket
    that was filled up, as before a tied embedding, which has a bucket to itself, would be saved shifted.
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/optimizer/distrib_optimizer.py#L1498
    """

    def get_parameter_state_dp_zero(self, *args: Any, **kwargs: Any) -> dict[Any, Any] | None:
        """Megatron's state of each buffer, its tensors [numel of the buffer]; None on ranks that gather nothing."""
        state: dict[Any, Any] | None = super().get_parameter_state_dp_zero(*args, **kwargs)
        if state is None:
            return None
        for number, buffer in enumerate(self.buffers):
            for tensors in state[number].values():
                for key, value in tensors.items():
                    if isinstance(value, Tensor):
                        tensors[key] = _with_room(value, buffer)
        return state


def _with_room(packed: Tensor, buffer: Any) -> Tensor:
    """[numel] of the buffer, from the contents of its buckets one behind the other; zero between them."""
    if packed.numel() == buffer.numel:
        return packed
    whole = packed.new_zeros(buffer.numel)
    contents = packed.split([bucket.numel_unpadded for bucket in buffer.buckets])
    for (first, _), content in zip(buffer.bucket_indices, contents, strict=True):
        whole[first : first + len(content)] = content
    return whole
