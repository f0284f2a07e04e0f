"""Overlap of gradient reduction with the backward pass, and of weight gathering with the next forward pass.

Both work by buckets, which Megatron fills from the last layer to the first. Every rank starts the same collectives in
the same order: gradients bucket by bucket as the backward pass completes each, or all at once on a rank without rows;
weights right after the update, from the first layers on. Only waiting depends on what a rank computes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import nn

from meshwright.runtime.model.kernel_choice import ChosenKernels
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import Decoder, ModelChunks

_ALIGNMENT = 64
"""Number of elements that Megatron aligns the start of a parameter in its buffer to.
https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/distributed/param_and_grad_buffer.py
"""


@dataclass(frozen=True)
class Buckets:
    """The bucket size of overlapped gradient reduction and weight gathering."""

    min_params: int
    """Minimum number of parameters of a bucket, so that bandwidth and not latency dominates its time. A bucket also has
    at least one whole layer, except the last bucket and tied embeddings. If two buckets ended within one layer, the
    backward pass might complete them in the opposite order."""

    def size(self, chunk: Decoder) -> int:
        """Minimum number of parameters of a bucket of this chunk."""
        layers = (sum(map(_padded_numel, layer.parameters())) for layer in chunk.decoder.layers)
        return max(self.min_params, *layers)


def _padded_numel(parameter: nn.Parameter) -> int:
    return -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT


def overlap_buckets(model: ModelChunks, mesh: Mesh, kernels: ChosenKernels) -> Buckets | None:
    """The buckets of a trained model; None if its replicas reduce all gradients at once, after the backward pass.

    Models with experts are not bucketed because an expert without tokens has no gradient that would complete its
    bucket, and adapters because they have too few parameters. The minimum size is Megatron's:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/distributed/distributed_data_parallel.py
    """
    num_replicas = mesh.groups.dp_cp.size()
    if not kernels.overlaps_replicas or num_replicas == 1 or model.spec.experts or model.spec.adapter:
        return None
    return Buckets(max(40_000_000, 1_000_000 * num_replicas))


def ddp_config(chunk: Decoder, buckets: Buckets | None) -> DistributedDataParallelConfig:
    """Megatron's settings for the gradient buffers and collectives of a chunk."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=buckets is not None,
        overlap_param_gather=buckets is not None,
        bucket_size=buckets.size(chunk) if buckets else None,
    )


class ReplicaExchange:
    """The overlapped collectives between the replicas of one trainer.

    Megatron's own hooks start to gather weights in the forward pass, which a replica without rows does not run, and
    count in the first backward pass how often each gradient is produced. Here each is produced exactly once.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self._groups: list[Any] = [group for chunk in reversed(chunks) for group in chunk.bucket_groups]
        for group in self._groups:
            group.is_first_batch = False
            group.golden_per_param_grad_ready_counts = dict.fromkeys(group.params, 1)
        for chunk in chunks:
            chunk.disable_forward_pre_hook(param_sync=False)
            for module in chunk.module.modules():
                parameters = module.parameters(recurse=False)
                groups = dict.fromkeys(chunk.param_to_bucket_group[parameter] for parameter in parameters)
                if groups:
                    module.register_forward_pre_hook(functools.partial(_wait, tuple(groups)))

    def start_gradients(self) -> None:
        """Starts the gradient reduction of an update to which this rank contributes no gradients."""
        for group in self._groups:
            group.start_grad_sync()

    def start_weights(self) -> None:
        """Starts to gather the updated weights, of which each rank has a shard."""
        for group in reversed(self._groups):
            group.start_param_sync()

    def finish_weights(self) -> None:
        """Waits until all weights are gathered; returns at once if no gather is in progress."""
        _wait(self._groups)


def _wait(groups: Sequence[Any], *_: Any) -> None:
    for group in groups:
        if group.param_gather_handle is not None:
            group.start_param_sync(force_sync=True)  # this waits for a gather in progress
