"""The layers of a decoder as megatron specs, of megatron's own parallel linears and no Transformer Engine."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from meshwright.profiles.model_parts.adapter import Linear
from meshwright.profiles.model_shape import ModelSpec
from meshwright.runtime.device import host
from meshwright.runtime.model.adapted import AdaptedColumns, AdaptedRows, linear_class
from meshwright.runtime.model.attention import CoreAttention, Rotate
from meshwright.runtime.model.chosen_kernels import PLAIN, ChosenKernels
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.varlen_attention import torch_kernel


def block_of_layers(spec: ModelSpec, layers: range, kernels: ChosenKernels = PLAIN) -> TransformerBlockSubmodules:
    """The decoder layers of one pipeline stage, by their numbers in the whole model."""
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_attention(spec, layers.start, kernels),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_experts() if spec.experts else _gated_mlp(spec, kernels),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * len(layers), layer_norm=RMSNorm)


def _attention(spec: ModelSpec, first_layer: int, kernels: ChosenKernels) -> ModuleSpec:
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=_columns(spec, "linear_qkv", has_bias=False),  # megatron has a switch of its own for it
            core_attention=functools.partial(
                CoreAttention,
                first_layer=first_layer,
                varlen=torch_kernel() if kernels.attention == "varlen" else None,
                turned=_rotary_kernel() if kernels.operators == "fused" else None,
            ),
            linear_proj=_rows(spec, "linear_proj", has_bias=spec.output_bias),
            q_layernorm=RMSNorm if spec.qk_norm else None,
            k_layernorm=RMSNorm if spec.qk_norm else None,
        ),
    )


def _rotary_kernel() -> Rotate:
    from meshwright.runtime.kernels.rotary import rotate  # noqa: PLC0415 - there is Triton where it was chosen

    return rotate


def _gated_mlp(spec: ModelSpec, kernels: ChosenKernels) -> ModuleSpec:
    return ModuleSpec(
        module=MLP,
        params={"ffn_hidden_size": spec.ffn_size},
        submodules=MLPSubmodules(
            linear_fc1=_columns(spec, "linear_fc1", has_bias=spec.mlp_bias),
            activation_func=_FusedGates if has_fused_gates(spec, kernels) else None,
            linear_fc2=_rows(spec, "linear_fc2", has_bias=spec.mlp_bias),
        ),
    )


def _columns(spec: ModelSpec, name: Linear, *, has_bias: bool) -> type:
    if has_bias:
        return linear_class(_BiasedColumnParallelLinear, _BiasedAdaptedColumns, spec, name)
    return linear_class(ColumnParallelLinear, AdaptedColumns, spec, name)


def _rows(spec: ModelSpec, name: Linear, *, has_bias: bool) -> type:
    if has_bias:
        return linear_class(_BiasedRowParallelLinear, _BiasedAdaptedRows, spec, name)
    return linear_class(RowParallelLinear, AdaptedRows, spec, name)


def _experts() -> ModuleSpec:
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    experts = ModuleSpec(module=SequentialMLP, submodules=linears)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, router=_Router))


def keep_tokens_apart(layer: MoELayer, mesh: Mesh) -> None:
    """Makes a layer of experts fit for tensor-parallel ranks that all have the same tokens."""
    layer.token_dispatcher = _ColumnDispatcher(layer.num_local_experts, layer.config, mesh)


class _ColumnDispatcher(MoEAlltoAllTokenDispatcher):
    """Passes the tokens of each tensor-parallel rank through its own width of the experts, or through the whole ones
    that it and its counterparts in other replicas hold, and sums the answers.

    Megatron's takes the tokens of those ranks for different ones, as they are under sequence parallelism, and would
    compute each once per rank. The sum has no gradients: megatron trains with sequence parallelism only.
    """

    def __init__(self, num_local: int, config: TransformerConfig, mesh: Mesh) -> None:
        column, folded = mesh.expert_column, mesh.layout.folded
        first = mesh.dp_rank % mesh.layout.expert_replicas * num_local
        mine = copy.copy(config)
        mine.num_moe_experts = num_local * mesh.layout.expert_replicas
        alike = ProcessGroupCollection(ep=column, expt_tp=None, tp_ep=column)
        super().__init__(num_local, [*range(first, first + num_local)], config=mine, pg_collection=alike)
        parts = torch.arange(mine.num_moe_experts * folded, device=host.device()).view(-1, folded, num_local)
        self._mine = parts[:, mesh.tp_rank // mesh.layout.etp].flatten() if folded > 1 else None
        self._summed_over = mesh.groups.tp

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        if self._mine is not None:
            routing_map, probs = routing_map[:, self._mine], probs[:, self._mine]
        found: tuple[Tensor, Tensor] = super().dispatch_preprocess(hidden_states, routing_map, probs)
        return found

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        output: Tensor = super().combine_postprocess(permutated_local_input_tokens)
        dist.all_reduce(output, group=self._summed_over)
        return output


class _Router(TopKRouter):
    """Megatron's, with a product of its own: megatron's names a function of Transformer Engine without looking for it.

    Megatron makes the weight on the CPU and moves it in its own product, so here it is moved once it is made.
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/transformer/moe/moe_utils.py#L1192
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/transformer/moe/router.py#L53
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config, pg_collection)
        self.to(host.device())

    def gating(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight)


def has_fused_gates(spec: ModelSpec, kernels: ChosenKernels) -> bool:
    """Whether a kernel takes the gates of the MLP and what they let through: of SwiGLU, and not of experts."""
    return kernels.operators == "fused" and spec.activation == "silu" and not spec.experts


class _FusedGates(nn.Module):
    """Stands where megatron has Transformer Engine's activation of both halves."""

    def __init__(self, config: TransformerConfig) -> None:  # noqa: ARG002 - megatron gives it
        from meshwright.runtime.kernels.gates import gated  # noqa: PLC0415 - there is Triton where it was chosen

        super().__init__()
        self._gated = gated

    def forward(self, up: Tensor) -> Tensor:
        """[S, B, F] from [S, B, 2 F]."""
        return self._gated(up)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing of a checkpoint."""
        return {}


class _Biased:
    """Has a bias whatever megatron asks for: its one switch would give a bias to every linear of the layer."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **{**options, "bias": True})


class _BiasedColumnParallelLinear(_Biased, ColumnParallelLinear): ...


class _BiasedRowParallelLinear(_Biased, RowParallelLinear): ...


class _BiasedAdaptedColumns(_Biased, AdaptedColumns): ...


class _BiasedAdaptedRows(_Biased, AdaptedRows): ...


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, its weight kept relative to `norm_offset`.

    Megatron's own refuses sequence parallelism. There each rank sees a part of the tokens and has a part of the
    weight's gradient; the mark on the weight tells megatron to sum the parts.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.epsilon = eps
        self.weight = _parameter((hidden_size,), 1.0 - self.offset, config)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden] of the type that it has, from [..., hidden]."""
        if not self.offset:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.epsilon)
        # In fp32, because a small relative weight would be rounded away when one is added to it in bf16.
        weight = self.weight.float() + self.offset
        return F.rms_norm(hidden.float(), weight.shape, weight, self.epsilon).to(hidden.dtype)


class ScalarHead(nn.Module):
    """One fp32 number per token, [S, B, 1], from hidden states [S, B, hidden] or this rank's part of the sequence.

    Stands where megatron keeps the vocabulary's output layer. With sequence parallelism the numbers are gathered, not
    the hidden states.
    """

    def __init__(self, config: TransformerConfig, tp_group: dist.ProcessGroup) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = tp_group
        self.weight = _parameter((1, config.hidden_size), 0.0, config)

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """The numbers [S, B, 1] fp32 and, as from every parallel linear of megatron, a bias; there is none."""
        numbers = F.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            # Every rank goes on with the same numbers, so the gradient of its own part is all it needs back.
            numbers = gather_from_sequence_parallel_region(
                numbers, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return numbers, None


def _parameter(shape: tuple[int, ...], value: float, config: TransformerConfig) -> nn.Parameter:
    """A weight that every tensor-parallel rank holds whole."""
    weight = nn.Parameter(torch.full(shape, value, device=host.device(), dtype=config.params_dtype))
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight
