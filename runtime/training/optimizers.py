"""The Megatron distributed optimizers of one model, over torch's AdamW.

With expert parallelism fewer replicas hold an expert than hold the rest of the model. Gradients of experts are summed,
and their moments sharded, over those replicas only, so experts have a separate optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import nn

from meshwright.runtime.device import host
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.training.distributed_optimizer import DirectlySavedOptimizer


def distributed_optimizers(
    chunks: Sequence[DistributedDataParallel], mesh: Mesh, config: OptimizerConfig
) -> list[DistributedOptimizer]:
    """One optimizer for the parameters on every replica and, with expert parallelism, one for the experts."""
    return [
        _distributed_optimizer(chunks, mesh, config, parameter_set) for parameter_set in _parameter_sets(chunks, mesh)
    ]


def clip_gradients(optimizers: Sequence[DistributedOptimizer]) -> float:
    """Clips all gradients to the maximum norm of the settings; returns their total norm before."""
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
