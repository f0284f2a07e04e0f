"""Linears with a low-rank adapter (LoRA) and frozen weights; `profiles.model_parts.adapter` has the equation.

An adapter is sharded as its linear is: in a column-parallel linear B is sharded and A replicated, in a row-parallel
linear A is sharded and B replicated. Weight and adapter are never merged while in use: a refit transfers only the
adapter, and the frozen weights also serve as the reference model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from meshwright.profiles.model_parts.adapter import Adapter, Linear
from meshwright.profiles.model_shape import ModelSpec
from meshwright.runtime.model.hf_checkpoint import OUTPUT, expert_of

DOWN, UP = "adapter_down", "adapter_up"
"""Names of the parameters A [rank, inputs] and B [outputs, rank] of a linear."""


def is_adapter_parameter(parameter: str) -> bool:
    """True for the name of an adapter's parameter."""
    return parameter.rpartition(".")[2] in (DOWN, UP)


def is_trained_parameter(spec: ModelSpec, parameter: str) -> bool:
    """True for the name of a parameter that training changes: any of a model without an adapter, otherwise those of the
    adapter and the scalar head."""
    return spec.adapter is None or is_adapter_parameter(parameter) or (spec.scalar_head and parameter.endswith(OUTPUT))


class _Adapted:
    """A linear with an adapter; see `linear_class`."""

    adapter: Adapter
    weight: Any  # a parameter with megatron's attributes of tensor parallelism
    uses_adapter: bool
    adapter_down: nn.Parameter
    adapter_up: nn.Parameter

    def _allocate_adapter(self) -> None:
        """Allocates the adapter of this rank's shard of the weight."""
        (outputs, inputs), rank, like = self.weight.shape, self.adapter.rank, self.weight
        self.uses_adapter = True
        self.adapter_down = nn.Parameter(torch.zeros(rank, inputs, dtype=like.dtype, device=like.device))
        self.adapter_up = nn.Parameter(torch.zeros(outputs, rank, dtype=like.dtype, device=like.device))

    def _add_adapter(
        self, linear_output: tuple[Tensor, Tensor | None], input_: Tensor, communicate: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Adds the adapter's product to the linear's output, [sequence, batch, outputs of this rank] and a bias.

        `communicate` is the collective between the matrices A and B: it turns the output of A into the input of B,
        [sequence, batch, rank], on this rank.
        """
        if not self.uses_adapter:
            return linear_output
        output, bias = linear_output
        low = communicate(F.linear(input_, self.adapter_down))
        return torch.add(output, F.linear(low, self.adapter_up), alpha=self.adapter.scale), bias


class AdaptedColumnParallelLinear(_Adapted, ColumnParallelLinear):
    """Megatron's column-parallel linear with an adapter."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self._allocate_adapter()
        # With sequence parallelism each rank has a part of the tokens, and so of this gradient; megatron sums them.
        self.adapter_down.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        set_tensor_model_parallel_attributes(self.adapter_up, True, 0, self.weight.partition_stride)

    def forward(self, input_: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """The output [S, B, outputs / tp] and a bias, for [S, B, inputs] or this rank's part of the sequence."""
        communicate = (
            gather_from_sequence_parallel_region if self.sequence_parallel else copy_to_tensor_model_parallel_region
        )
        linear_output = super().forward(input_, *others, **options)
        return self._add_adapter(linear_output, input_, partial(communicate, group=self.tp_group))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """The sharded state, in which B is sharded as the weight is: if each rank holds its shards of gate and up
        concatenated, the two are saved separately."""
        return _column_state(self, prefix, sharded_offsets, metadata)


class AdaptedRowParallelLinear(_Adapted, RowParallelLinear):
    """Megatron's row-parallel linear with an adapter."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self._allocate_adapter()
        self.adapter_up.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        set_tensor_model_parallel_attributes(self.adapter_down, True, 1, 1)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output [S, B, outputs] or this rank's part of the sequence, and a bias, for [S, B, inputs / tp]."""
        if self.sequence_parallel:
            reduce = reduce_scatter_to_sequence_parallel_region
        else:
            reduce = reduce_from_tensor_model_parallel_region
        return self._add_adapter(super().forward(input_), input_, partial(reduce, group=self.tp_group))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """The sharded state, in which A is sharded as the weight is."""
        return _sharded(self, prefix, sharded_offsets, metadata, {"weight": 1, DOWN: 1})


class _AdaptedExpert(_Adapted):
    """A linear of an expert with an adapter.

    The token dispatcher gives all ranks that share an expert the same tokens, sums their outputs, and sums their
    gradients of the tokens. So nothing is communicated between A and B: each rank adds the product of its shards, and
    the replicated one of A and B has a part of its gradient on each rank, which megatron sums by its mark. Ranks that
    hold experts whole have whole gradients, and no other rank has the same parameters.
    """

    is_expert: bool
    tp_group: Any

    def _allocate_expert_adapter(self, replicated: str) -> None:
        """Allocates the adapter, whose parameter `replicated` is on all ranks that share the expert."""
        self._allocate_adapter()
        is_shared = self.tp_group.size() > 1
        for name in (DOWN, UP):
            parameter = getattr(self, name)
            parameter.allreduce = self.weight.allreduce  # False if it is on some replicas only
            if not is_shared or name != replicated:
                dim, stride = (0, self.weight.partition_stride) if name == UP else (1, 1)
                set_tensor_model_parallel_attributes(parameter, True, dim, stride if is_shared else 1)
            parameter.sequence_parallel = is_shared and name == replicated

    def _add_expert_adapter(
        self, linear_output: tuple[Tensor, Tensor | None], input_: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return self._add_adapter(linear_output, input_, lambda low: low)


class AdaptedExpertColumns(_AdaptedExpert, ColumnParallelLinear):
    """The first linear of an expert with an adapter, of which ranks that share the expert have shards of B."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self._allocate_expert_adapter(DOWN)

    def forward(self, input_: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """The output [T, outputs / etp] and no bias, for tokens [T, inputs]."""
        return self._add_expert_adapter(super().forward(input_, *others, **options), input_)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """The sharded state; see `AdaptedColumnParallelLinear`."""
        return _column_state(self, prefix, sharded_offsets, metadata)


class AdaptedExpertRows(_AdaptedExpert, RowParallelLinear):
    """The second linear of an expert with an adapter, of which ranks that share the expert have shards of A."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self._allocate_expert_adapter(UP)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """This rank's part of the output [T, outputs] and no bias, for [T, inputs / etp]."""
        return self._add_expert_adapter(super().forward(input_), input_)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """The sharded state, in which A is sharded as the weight is."""
        return _sharded(self, prefix, sharded_offsets, metadata, {"weight": 1, DOWN: 1})


def linear_class(plain: type, adapted: type, spec: ModelSpec, name: Linear) -> type:
    """The class of a model's linears of this name: `adapted` if they have an adapter, else `plain`."""
    if spec.adapter is None or name not in spec.adapter.targets:
        return plain
    return type(adapted.__name__, (adapted,), {"adapter": spec.adapter})


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Context in which the model runs without its adapter."""
    adapted = [module for module in model.modules() if isinstance(module, _Adapted)]
    for module in adapted:
        module.uses_adapter = False
    try:
        yield
    finally:
        for module in adapted:
            module.uses_adapter = True


@torch.no_grad()
def init_adapter(parameters: Mapping[str, nn.Parameter], seed: int, *, tp: int, tp_rank: int, etp: int = 0) -> None:
    """Initialises the adapters among a rank's parameters, named as in the whole model; those of experts are sharded
    over `etp` ranks, which is tp if it is 0.

    B is zero and A uniform within +-1 / sqrt(inputs), with the same numbers in every layout.
    """
    for name, parameter in parameters.items():
        module, _, kind = name.rpartition(".")
        if kind == UP:
            parameter.zero_()
        elif kind == DOWN:
            rank, width = parameter.shape
            num_ranks = etp if etp and expert_of(name) is not None else tp
            is_sharded = getattr(parameter, "tensor_model_parallel", False)
            num_shards, shard = (num_ranks, tp_rank % num_ranks) if is_sharded else (1, 0)
            whole = _uniform(f"{seed}/{module}", (rank, num_shards * width))
            parameter.copy_(whole[:, shard * width : (shard + 1) * width])


@torch.no_grad()
def merge_adapter(parameters: Mapping[str, Tensor], name: str, adapter: Adapter | None) -> Tensor:
    """A rank's shard [outputs, inputs] of a weight, with its adapter merged in fp32 if it has one; any other parameter
    [...] unchanged."""
    weight, module = parameters[name].detach(), name.rpartition(".")[0]
    if adapter is None or name != f"{module}.weight" or f"{module}.{DOWN}" not in parameters:
        return weight
    up, down = (parameters[f"{module}.{kind}"].detach().float() for kind in (UP, DOWN))
    return (weight.float() + adapter.scale * up @ down).to(weight.dtype)


def _uniform(key: str, shape: tuple[int, int]) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7])
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))


def _column_state(module: Any, prefix: str, offsets: Any, metadata: Any) -> dict[str, Any]:
    """The sharded state of a linear whose outputs are sharded."""
    state = _sharded(module, prefix, offsets, metadata, {"weight": 0, "bias": 0, UP: 0})
    if module.weight.partition_stride > 1:
        state[f"{prefix}{UP}"] = apply_swiglu_sharded_factory(state[f"{prefix}{UP}"], offsets)
    return state


def _sharded(
    module: Any,
    prefix: str,
    offsets: Any,
    metadata: Any,
    axes: Mapping[str, int],
) -> dict[str, Any]:
    state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
        module.state_dict(prefix="", keep_vars=True),
        prefix,
        axes,
        offsets,
        tp_group=module.tp_group,
        dp_cp_group=metadata["dp_cp_group"],
    )
    return state
