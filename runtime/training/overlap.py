"""Gradients that are summed over replicas while the backward pass goes on, and weights that are gathered while the next
forward pass does.

Both go by buckets, which megatron fills from the last layer to the first. Every rank starts the same exchanges in the
same order: gradients bucket after bucket, as the backward pass comes to the end of each, or without one all at once;
weights right behind the update, the first layers' first. Only waiting depends on what a rank computes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import nn

from meshwright.runtime.model.chosen_kernels import ChosenKernels
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import Decoder, Held

_ALIGNED = 64
"""Elements to which megatron rounds the beginning of a parameter in its buffer.
https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/distributed/param_and_grad_buffer.py
"""


@dataclass(frozen=True)
class Buckets:
    """How what replicas exchange is cut so that it overlaps computing."""

    least_params: int
    """Parameters of a bucket at least, so that bandwidth and not latency decides its time. No bucket is smaller than a
    layer, but for what is left at the bottom and for tied embeddings: of two that lie in one layer, the backward pass
    may come to the end of the later one first."""

    def size(self, chunk: Decoder) -> int:
        """Parameters of a bucket of this chunk, at least."""
        layers = (sum(map(_room, layer.parameters())) for layer in chunk.decoder.layers)
        return max(self.least_params, *layers)


def _room(parameter: nn.Parameter) -> int:
    return -(-parameter.numel() // _ALIGNED) * _ALIGNED


def own_buckets(model: Held, mesh: Mesh, kernels: ChosenKernels) -> Buckets | None:
    """Those of a trained model; None where its replicas exchange in one piece, when all is computed.

    An expert that no token met has no gradient to announce, and an adapter has too few parameters to cut.
    The least size is megatron's own:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/distributed/distributed_data_parallel.py
    """
    num_replicas = mesh.groups.dp_cp.size()
    if not kernels.overlaps_replicas or num_replicas == 1 or model.spec.experts or model.spec.adapter:
        return None
    return Buckets(max(40_000_000, 1_000_000 * num_replicas))


def ddp_config(chunk: Decoder, buckets: Buckets | None) -> DistributedDataParallelConfig:
    """How megatron keeps and exchanges the gradients and weights of a chunk."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=buckets is not None,
        overlap_param_gather=buckets is not None,
        bucket_size=buckets.size(chunk) if buckets else None,
    )


class ReplicaExchange:
    """What the replicas of one trainer have on its way between them.

    Megatron's own hooks gather weights when a forward pass asks for them, which a replica without rows does not run,
    and learn from the first backward pass how often each gradient comes. Here that is known: once.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self._groups: list[Any] = [group for chunk in reversed(chunks) for group in chunk.bucket_groups]
        for group in self._groups:
            group.is_first_batch = False
            group.golden_per_param_grad_ready_counts = dict.fromkeys(group.params, 1)
        for chunk in chunks:
            chunk.disable_forward_pre_hook(param_sync=False)
            for module in chunk.module.modules():
                own = module.parameters(recurse=False)
                groups = dict.fromkeys(chunk.param_to_bucket_group[parameter] for parameter in own)
                if groups:
                    module.register_forward_pre_hook(functools.partial(_wait, tuple(groups)))

    def start_gradients(self) -> None:
        """Takes part in the sums of an update for which this rank has nothing to add."""
        for group in self._groups:
            group.start_grad_sync()

    def start_weights(self) -> None:
        """Begins to gather the weights that each rank has updated its part of."""
        for group in reversed(self._groups):
            group.start_param_sync()

    def finish_weights(self) -> None:
        """Waits for all weights; without effect where none are on their way."""
        _wait(self._groups)


def _wait(groups: Sequence[Any], *_: Any) -> None:
    for group in groups:
        if group.param_gather_handle is not None:
            group.start_param_sync(force_sync=True)  # which, of one that is on its way, waits for it
