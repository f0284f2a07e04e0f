"""Megatron's distributed optimizer as the trainers here use it."""

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
from meshwright.runtime.device.host_copies import copied_to_host

_STATE = ("param", "exp_avg", "exp_avg_sq")
"""What a checkpoint holds of each parameter, in fp32 and in its shape: the main weight and the moments."""

Sharded: TypeAlias = ShardedTensor | ShardedTensorFactory


class DirectlySavedOptimizer(DistributedOptimizer):
    """Has a checkpoint take the state of each parameter from the rank where it lies.

    Megatron gathers the state of whole buffers on the host of every replica, in several copies, and looks for what
    stands behind a bucket that was filled up in the wrong place. Here one replica holds most of a parameter and writes
    it; it asks the others for what they have of it, if anything. The files hold the same.
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/optimizer/distrib_optimizer.py#L1404
    """

    def sharded_param_state_fully_reshardable(
        self, model_sharded_state_dict: dict[str, Any], is_loading: bool = False, _metadata: Any = None
    ) -> dict[int, dict[str, Sharded]]:
        """The state of parameters by their numbers, as megatron's sharded tensors. Collective over the replicas.

        To save, of those that this rank writes, and of these the very tensors that training changes where they are
        whole. To load, room for all that this rank holds a part of.
        """
        parameters, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
        sharded = {found.data: found for found in nested_values(parameters)}
        state = {}
        for number, (parameter, sizes) in enumerate(self._cuts()):
            of_parameter = sharded[parameter]
            if is_loading:
                room = {name: torch.empty(parameter.shape, dtype=torch.float32, device="cpu") for name in _STATE}
                state[number] = _sharded_as(of_parameter, room, of_parameter.replica_id)
            elif not any(of_parameter.replica_id[:-1]) and (found := self._on_one_rank(parameter, sizes)):
                state[number] = _sharded_as(of_parameter, found, (0,) * len(of_parameter.replica_id))
        return state

    def _cuts(self) -> Iterator[tuple[nn.Parameter, list[int]]]:
        """Parameters in the order of megatron's checkpoints, and how many elements of each every replica holds."""
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

    def _on_one_rank(self, parameter: nn.Parameter, sizes: Sequence[int]) -> dict[str, Tensor]:
        """The whole state of a parameter on the replica that holds most of it; empty on the others."""
        rank, owner = self.data_parallel_group.rank(), sizes.index(max(sizes))
        held = self._get_main_param_and_optimizer_states(parameter) if sizes[rank] else {}
        if sizes[owner] == parameter.numel():
            return {name: held[name].detach().view(parameter.shape) for name in _STATE} if rank == owner else {}
        found = {}
        for name in _STATE:
            piece = held[name].detach() if held else torch.empty(0, device=host.device())
            whole = _gathered(piece, sizes, owner, self.data_parallel_group)
            if rank == owner:  # one at a time, so that a device needs room for no more
                found[name] = (copied_to_host([whole])[0] if host.on_cuda() else whole).view(parameter.shape)
        return found


def _gathered(piece: Tensor, sizes: Sequence[int], owner: int, group: dist.ProcessGroup) -> Tensor:
    """The pieces of all ranks of the group one behind the other, on the owner; [0] on the others."""
    rank, nothing = group.rank(), [0] * len(sizes)
    whole = piece.new_empty(sum(sizes) if rank == owner else 0)
    sent = [len(piece) if other == owner else 0 for other in range(len(sizes))]
    dist.all_to_all_single(whole, piece, [*sizes] if rank == owner else nothing, sent, group=group)
    return whole


def _sharded_as(of_parameter: Sharded, state: dict[str, Tensor], replica: tuple[int, ...]) -> dict[str, Sharded]:
    """The state of a parameter, cut over ranks as the parameter is."""
    made = {}
    for name, tensor in state.items():
        changed: dict[str, Any] = {
            "key": f"optimizer.state.{name}.{of_parameter.key}",
            "data": tensor,
            "replica_id": replica,
        }
        if isinstance(of_parameter, ShardedTensor):
            changed["dtype"] = tensor.dtype
        made[name] = replace(of_parameter, **changed)
    return made
