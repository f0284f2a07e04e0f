"""The Megatron distributed optimizers of one model, over torch's AdamW, with checkpoints that save each parameter's
state from the rank that holds most of it.

With expert parallelism fewer replicas hold an expert than hold the rest of the model. Gradients of experts are summed,
and their moments sharded, over those replicas only, so experts have a separate optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from meshwright.runtime.device import host
from meshwright.runtime.device.host_copies import copy_to_host
from meshwright.runtime.model.mesh import Mesh

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
        """The state of parameters by their index, as Megatron's sharded tensors. Collective over the replicas.

        For saving, it has the parameters that this rank writes; if this rank holds the whole state of a parameter, the
        tensors are those that training updates, not copies. For loading, it has empty host tensors for all parameters
        of which this rank holds a shard.
        """
        parameters, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
        sharded_of = {sharded.data: sharded for sharded in nested_values(parameters)}
        state = {}
        for number, (parameter, sizes) in enumerate(self._shard_sizes()):
            sharded = sharded_of[parameter]
            if is_loading:
                empty = {name: torch.empty(parameter.shape, dtype=torch.float32, device="cpu") for name in _STATE}
                state[number] = _sharded_as(sharded, empty, sharded.replica_id)
            # A replica id is (pp, tp, dp); of the copies of a parameter within a replica only (0, 0, dp) is written.
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


def distributed_optimizers(
    chunks: Sequence[DistributedDataParallel], mesh: Mesh, config: OptimizerConfig
) -> list[DistributedOptimizer]:
    """One optimizer for the parameters on every replica and, with expert parallelism, one for the experts."""
    return [
        _distributed_optimizer(chunks, mesh, config, parameter_set) for parameter_set in _parameter_sets(chunks, mesh)
    ]


def clip_gradients(optimizers: Sequence[DistributedOptimizer]) -> float:
    """Clips all gradients to the maximum norm of the settings; returns their total norm before clipping."""
    norm = ChainedOptimizer([*optimizers]).get_grad_norm()
    for optimizer in optimizers:
        megatron_optimizer.clip_grad_by_total_norm_fp32(optimizer.get_parameters(), optimizer.config.clip_grad, norm)
    return float(norm)


def set_learning_rate(optimizers: Sequence[DistributedOptimizer], learning_rate: float) -> None:
    """Sets the learning rate of all parameters."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_mult"]


@dataclass(frozen=True)
class _ParameterSet:
    """Parameters that are on the same replicas, and the buffers of each chunk that hold them and their gradients."""

    parameters: list[nn.Parameter]
    buffers: list[list[Any]]
    replicas: dist.ProcessGroup
    position: int
    """This rank's position among those that hold other parts of the model."""


def _parameter_sets(chunks: Sequence[DistributedDataParallel], mesh: Mesh) -> Iterator[_ParameterSet]:
    """Yields the parameters on every replica and, with expert parallelism, those of the experts."""
    groups, expert_buffers = mesh.groups, [chunk.expert_parallel_buffers for chunk in chunks]
    experts = {parameter for buffers in expert_buffers for buffer in buffers for parameter in buffer.params}
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters() if parameter.requires_grad]
    dense = [parameter for parameter in parameters if parameter not in experts]
    yield _ParameterSet(dense, [chunk.buffers for chunk in chunks], groups.dp_cp, groups.mp.rank())
    if experts:
        of_experts = [parameter for parameter in parameters if parameter in experts]
        yield _ParameterSet(of_experts, expert_buffers, groups.expt_dp, groups.tp_ep_pp.rank())


def _distributed_optimizer(
    chunks: Sequence[DistributedDataParallel], mesh: Mesh, config: OptimizerConfig, parameter_set: _ParameterSet
) -> DirectlySavedOptimizer:
    """Megatron's distributed optimizer over torch's AdamW, for one set of the model's parameters.

    It is not built by Megatron's factory because that compares parameters over all ranks of the world, and a pool
    cannot wait for the ranks of another:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/optimizer/__init__.py
    """
    groups = [
        {
            "params": [p for p in parameter_set.parameters if p.ndim > 1],
            "weight_decay": config.weight_decay,
            "wd_mult": 1.0,
        },
        {"params": [p for p in parameter_set.parameters if p.ndim == 1], "weight_decay": 0.0, "wd_mult": 0.0},
    ]
    # The keys by which Megatron's checkpoints identify parameter groups. Groups of experts are not marked, so that a
    # layout with expert parallelism can read a checkpoint of one without.
    for group in groups:
        group |= {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True}
    adam = torch.optim.AdamW(
        groups,
        lr=config.lr or 0.0,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=host.on_cuda() or None,
    )
    optimizer = DirectlySavedOptimizer(
        adam,
        config,
        grad_scaler=None,
        init_state_fn=_start_moments,
        model_chunks=list(chunks),
        per_model_buffers=dict(enumerate(parameter_set.buffers)),
        data_parallel_group=parameter_set.replicas,
        data_parallel_group_gloo=None,
        data_parallel_group_idx=parameter_set.position,
        distributed_optimizer_instance_id=0,
    )
    optimizer.grad_stats_parallel_group = mesh.groups.intra_dist_opt
    optimizer.tp_group = mesh.groups.tp
    _start_moments(adam)
    return optimizer


def _start_moments(optimizer: torch.optim.Optimizer, _: OptimizerConfig | None = None) -> None:
    """Allocates all moments, which AdamW would do only in its first update; checkpoints need them before it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] |= {
                    "step": torch.zeros((), device=parameter.device if group["fused"] else None),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
