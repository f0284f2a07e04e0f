"""Megatron's distributed optimizer, with checkpoints that save each parameter's state from the rank that holds it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from meshwright.runtime.device import host
from meshwright.runtime.device.host_copies import copy_to_host

_STATE = ("param", "exp_avg", "exp_avg_sq")
"""State of each parameter in a checkpoint, in fp32 and in its shape: the main weight and the moments."""

Sharded: TypeAlias = ShardedTensor | ShardedTensorFactory


class DirectlySavedOptimizer(DistributedOptimizer):
    """Saves the state of each parameter from the rank that holds most of it.

    Megatron gathers the state of whole buffers on the host of every replica, in several copies, and looks in the wrong
    place for the bucket after one with padding. Here the replica that holds most of a parameter writes it and gathers
    the rest from the others. The files have the same content.
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/optimizer/distrib_optimizer.py#L1404
    """

    def sharded_param_state_fully_reshardable(
        self, model_sharded_state_dict: dict[str, Any], is_loading: bool = False, _metadata: Any = None
    ) -> dict[int, dict[str, Sharded]]:
        """The state of parameters by number, as Megatron's sharded tensors. Collective over the replicas.

        For saving: the parameters that this rank writes; a state that one rank holds whole is the tensor that training
        changes, not a copy. For loading: empty host tensors for all parameters that this rank holds a part of.
        """
        parameters, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
        sharded_of = {sharded.data: sharded for sharded in nested_values(parameters)}
        state = {}
        for number, (parameter, sizes) in enumerate(self._shard_sizes()):
            sharded = sharded_of[parameter]
            if is_loading:
                empty = {name: torch.empty(parameter.shape, dtype=torch.float32, device="cpu") for name in _STATE}
                state[number] = _sharded_as(sharded, empty, sharded.replica_id)
            elif not any(sharded.replica_id[:-1]) and (whole := self._gather_state(parameter, sizes)):
                state[number] = _sharded_as(sharded, whole, (0,) * len(sharded.replica_id))
        return state

    def _shard_sizes(self) -> Iterator[tuple[nn.Parameter, list[int]]]:
        """Yields parameters in the order of Megatron's checkpoints, and the number of elements on every replica."""
        num_replicas = self.data_parallel_group.size()
        for buffer in self.buffers:
            for parameter, (begin, end, bucket_number) in buffer.param_index_map.items():
                bucket = buffer.buckets[bucket_number]
                size = bucket.grad_data.numel() // num_replicas
                edges = [bucket.offset + replica * size for replica in range(num_replicas + 1)]
                yield (
                    parameter,
                    [max(0, min(end, edges[r + 1]) - max(begin, edges[r])) for r in range(num_replicas)],
                )

    def _gather_state(self, parameter: nn.Parameter, sizes: Sequence[int]) -> dict[str, Tensor]:
        """The whole state of a parameter on the replica that holds most of it; empty on the others."""
        rank, owner = self.data_parallel_group.rank(), sizes.index(max(sizes))
        shards = self._get_main_param_and_optimizer_states(parameter) if sizes[rank] else {}
        if sizes[owner] == parameter.numel():
            return {name: shards[name].detach().view(parameter.shape) for name in _STATE} if rank == owner else {}
        gathered = {}
        for name in _STATE:
            shard = shards[name].detach() if shards else torch.empty(0, device=host.device())
            whole = _gather(shard, sizes, owner, self.data_parallel_group)
            if rank == owner:  # moved to the host at once, so that the device holds one whole tensor at a time
                gathered[name] = (copy_to_host([whole])[0] if host.on_cuda() else whole).view(parameter.shape)
        return gathered


def _gather(shard: Tensor, sizes: Sequence[int], owner: int, group: dist.ProcessGroup) -> Tensor:
    """The shards of all ranks of the group concatenated [N], on the owner; [0] on the others."""
    rank, nothing = group.rank(), [0] * len(sizes)
    whole = shard.new_empty(sum(sizes) if rank == owner else 0)
    sent = [len(shard) if target == owner else 0 for target in range(len(sizes))]
    dist.all_to_all_single(whole, shard, [*sizes] if rank == owner else nothing, sent, group=group)
    return whole


def _sharded_as(parameter: Sharded, state: dict[str, Tensor], replica: tuple[int, ...]) -> dict[str, Sharded]:
    """The state of a parameter as sharded tensors, with the sharding of the parameter."""
    sharded = {}
    for name, tensor in state.items():
        changes: dict[str, Any] = {
            "key": f"optimizer.state.{name}.{parameter.key}",
            "data": tensor,
            "replica_id": replica,
        }
        if isinstance(parameter, ShardedTensor):
            changes["dtype"] = tensor.dtype
        sharded[name] = replace(parameter, **changes)
    return sharded
