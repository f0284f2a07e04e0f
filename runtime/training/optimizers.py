"""Megatron's distributed optimizers of one model, over torch's AdamW.

Where experts are spread, fewer replicas hold one of them than hold the rest of the model. Its gradients are summed and
its moments cut over those, which takes an optimizer of its own.
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
    """One for what every replica holds and, where experts are spread, one for those."""
    return [_distributed_optimizer(chunks, mesh, config, shared) for shared in _shared(chunks, mesh)]


def clip_gradients(optimizers: Sequence[DistributedOptimizer]) -> float:
    """Scales all gradients to the largest norm that is allowed; returns the norm that they had together."""
    norm = ChainedOptimizer([*optimizers]).get_grad_norm()
    for optimizer in optimizers:
        megatron_optimizer.clip_grad_by_total_norm_fp32(optimizer.get_parameters(), optimizer.config.clip_grad, norm)
    return float(norm)


def set_learning_rate(optimizers: Sequence[DistributedOptimizer], learning_rate: float) -> None:
    """Gives all parameters this learning rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_mult"]


@dataclass(frozen=True)
class _Shared:
    """Parameters that the same replicas hold, and the buffers of each chunk in which they and their gradients lie."""

    parameters: list[nn.Parameter]
    buffers: list[list[Any]]
    replicas: dist.ProcessGroup
    position: int
    """Of this rank among those that hold other parts of the model."""


def _shared(chunks: Sequence[DistributedDataParallel], mesh: Mesh) -> Iterator[_Shared]:
    """What every replica holds and, where experts are spread, those."""
    groups, spread = mesh.groups, [chunk.expert_parallel_buffers for chunk in chunks]
    experts = {parameter for buffers in spread for buffer in buffers for parameter in buffer.params}
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters() if parameter.requires_grad]
    common = [parameter for parameter in parameters if parameter not in experts]
    yield _Shared(common, [chunk.buffers for chunk in chunks], groups.dp_cp, groups.mp.rank())
    if experts:
        mine = [parameter for parameter in parameters if parameter in experts]
        yield _Shared(mine, spread, groups.expt_dp, groups.tp_ep_pp.rank())


def _distributed_optimizer(
    chunks: Sequence[DistributedDataParallel], mesh: Mesh, config: OptimizerConfig, shared: _Shared
) -> DirectlySavedOptimizer:
    """Megatron's distributed optimizer over torch's AdamW, for a part of the model's parameters.

    Made here because megatron's own maker has all ranks of the world compare their parameters, and a pool cannot wait
    for the ranks of another:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/optimizer/__init__.py
    """
    groups = [
        {"params": [p for p in shared.parameters if p.ndim > 1], "weight_decay": config.weight_decay, "wd_mult": 1.0},
        {"params": [p for p in shared.parameters if p.ndim == 1], "weight_decay": 0.0, "wd_mult": 0.0},
    ]
    # What megatron's checkpoints tell groups of parameters by. Those of experts bear no mark: a layout that spreads
    # them reads what one that does not has written.
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
        per_model_buffers=dict(enumerate(shared.buffers)),
        data_parallel_group=shared.replicas,
        data_parallel_group_gloo=None,
        data_parallel_group_idx=shared.position,
        distributed_optimizer_instance_id=0,
    )
    optimizer.grad_stats_parallel_group = mesh.groups.intra_dist_opt
    optimizer.tp_group = mesh.groups.tp
    _start_moments(adam)
    return optimizer


def _start_moments(optimizer: torch.optim.Optimizer, _: OptimizerConfig | None = None) -> None:
    """Gives every parameter its moments, which AdamW would make in its first update and checkpoints ask for before."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] |= {
                    "step": torch.zeros((), device=parameter.device if group["fused"] else None),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
