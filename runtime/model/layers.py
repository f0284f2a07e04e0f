"""The layers of a decoder as Megatron module specs, with Megatron's parallel linears and without Transformer Engine."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from meshwright.profiles.experts import Experts
from meshwright.profiles.model_parts.adapter import Linear
from meshwright.profiles.model_shape import ModelSpec
from meshwright.runtime.device import host
from meshwright.runtime.model.adapters import (
    AdaptedColumnParallelLinear,
    AdaptedExpertColumns,
    AdaptedExpertRows,
    AdaptedRowParallelLinear,
    linear_class,
)
from meshwright.runtime.model.attention import CoreAttention, Rotate, shards_of_heads, torch_varlen_kernel
from meshwright.runtime.model.gated_delta import GatedDelta
from meshwright.runtime.model.kernel_choice import PLAIN, ChosenKernels
from meshwright.runtime.model.latent_attention import LatentCoreAttention, LatentSelfAttention
from meshwright.runtime.model.mesh import Mesh


def block_of_layers(
    spec: ModelSpec, layers: range, kernels: ChosenKernels = PLAIN, config: TransformerConfig | None = None
) -> TransformerBlockSubmodules:
    """The module spec of one pipeline stage's decoder layers, given by their numbers in the whole model.

    `config` is needed for norms after attention and MLP.
    """
    norm = IdentityOp if spec.norms == "after" else RMSNorm
    has_residual = spec.norms != "before" or spec.residual_scale != 1.0
    residual = ModuleSpec(module=Residual, params={"spec": spec, "config": config})
    bda = residual if has_residual else get_bias_dropout_add
    attention = _attention(spec, layers.start, kernels)
    delta = ModuleSpec(module=GatedDelta, params={"spec": spec, "first_layer": layers.start})
    specs = [
        ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=norm,
                self_attention=delta if spec.linear_layers_between(layer, layer + 1) else attention,
                self_attn_bda=bda,
                pre_mlp_layernorm=norm,
                mlp=_experts(spec, spec.experts)
                if spec.experts and has_experts(spec, layer)
                else _gated_mlp(spec, kernels),
                mlp_bda=bda,
            ),
        )
        for layer in layers
    ]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def has_experts(spec: ModelSpec, layer: int) -> bool:
    """True if layer number `layer` of the whole model has experts in place of a plain MLP."""
    return spec.expert_layers_between(layer, layer + 1) > 0


class Residual(nn.Module):
    """The residual connection around attention or MLP: their output is normalised if a norm comes after them, and
    multiplied by the residual scale of the model."""

    def __init__(self, spec: ModelSpec, config: TransformerConfig) -> None:
        super().__init__()
        self.scale = spec.residual_scale
        self.norm = RMSNorm(config, spec.hidden_size, spec.norm_epsilon) if spec.norms != "before" else None

    def forward(self, *_: Any) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        """The function that megatron calls with an output [S, B, hidden] and its bias [hidden], the residual [S, B,
        hidden], and the dropout, which is 0."""
        return self._add

    def _add(self, output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, _: float) -> Tensor:
        output, bias = output_and_bias
        return residual + self.branch(output if bias is None else output + bias)

    def branch(self, output: Tensor) -> Tensor:
        """What is added to the residual, for `output` [..., hidden] of attention or MLP."""
        normed: Tensor = output if self.norm is None else self.norm(output)
        return normed if self.scale == 1.0 else normed * self.scale


def _attention(spec: ModelSpec, first_layer: int, kernels: ChosenKernels) -> ModuleSpec:
    core_attention = ModuleSpec(
        module=LatentCoreAttention if spec.latent else CoreAttention,
        params={
            "first_layer": first_layer,
            "varlen": torch_varlen_kernel() if kernels.attention == "varlen" else None,
            "rotate_kernel": _rotary_kernel() if kernels.operators == "fused" else None,
            "spec": spec,
        },
    )
    if spec.latent:
        return ModuleSpec(
            module=LatentSelfAttention,
            params={"spec": spec},
            submodules=MLASelfAttentionSubmodules(
                core_attention=core_attention,
                linear_proj=RowParallelLinear,
                q_layernorm=RMSNorm,
                kv_layernorm=RMSNorm,
            ),
        )
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=_columns(spec, "linear_qkv", has_bias=False),  # megatron adds the bias by add_qkv_bias
            core_attention=core_attention,
            linear_proj=_rows(spec, "linear_proj", has_bias=spec.output_bias),
            q_layernorm=_head_norm(spec, spec.num_heads),
            k_layernorm=_head_norm(spec, spec.num_kv_heads),
        ),
    )


def _head_norm(spec: ModelSpec, num_heads: int) -> type | ModuleSpec | None:
    """The norm of queries or keys, in every head or over all heads; None if there is none."""
    if spec.whole_qk_norm:
        return ModuleSpec(module=WholeNorm, params={"num_heads": num_heads})
    return RMSNorm if spec.qk_norm else None


def _rotary_kernel() -> Rotate:
    from meshwright.runtime.kernels.layer_ops import rotate  # noqa: PLC0415 - needs Triton

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
    return linear_class(ColumnParallelLinear, AdaptedColumnParallelLinear, spec, name)


def _rows(spec: ModelSpec, name: Linear, *, has_bias: bool) -> type:
    if has_bias:
        return linear_class(_BiasedRowParallelLinear, _BiasedAdaptedRows, spec, name)
    return linear_class(RowParallelLinear, AdaptedRowParallelLinear, spec, name)


def _experts(spec: ModelSpec, experts: Experts) -> ModuleSpec:
    of_shared = MLPSubmodules(
        linear_fc1=_columns(spec, "linear_fc1", has_bias=False), linear_fc2=_rows(spec, "linear_fc2", has_bias=False)
    )
    shared = ModuleSpec(module=_SharedExperts, submodules=of_shared) if experts.shared_ffn_size else None
    linears = MLPSubmodules(
        linear_fc1=linear_class(ColumnParallelLinear, AdaptedExpertColumns, spec, "linear_fc1"),
        linear_fc2=linear_class(RowParallelLinear, AdaptedExpertRows, spec, "linear_fc2"),
    )
    if spec.expert_bias:
        linears = MLPSubmodules(linear_fc1=_BiasedColumnParallelLinear, linear_fc2=_BiasedExpertRows)
    routed = ModuleSpec(module=_ScaledInputs if experts.scales_inputs else SequentialMLP, submodules=linears)
    router = functools.partial(_Router, experts=experts, has_bias=spec.expert_bias)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=routed, router=router, shared_experts=shared))


class _ScaledInputs(SequentialMLP):
    """Experts whose inputs are multiplied by the weights of the router, and not their outputs.

    Megatron has this for one expert per token only.
    """

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The outputs [T, hidden] of this rank's experts for T copies of tokens in the order of the experts, with the
        weight of each copy, [T]."""
        weights = permuted_probs.to(permuted_local_hidden_states.dtype).unsqueeze(-1)
        scaled = permuted_local_hidden_states * weights
        outputs: tuple[Tensor, Tensor | None] = super().forward(
            scaled, tokens_per_expert, torch.ones_like(permuted_probs)
        )
        return outputs


class _SharedExperts(SharedExpertMLP):
    """Megatron's shared experts, whose gate it makes on the CPU, on the device of the model.

    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/transformer/moe/shared_experts.py#L57
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.to(host.device())


def keep_tokens_apart(layer: MoELayer, mesh: Mesh) -> None:
    """Replaces the token dispatcher of an MoE layer by one for tensor-parallel ranks that all have the same tokens."""
    layer.token_dispatcher = _ColumnDispatcher(layer.num_local_experts, layer.config, mesh)


class _ColumnDispatcher(MoEAlltoAllTokenDispatcher):
    """Dispatches tokens that are the same on all tensor-parallel ranks, and sums the outputs over these ranks.

    Each rank passes them through its tensor-parallel shards of the experts, or through the whole experts that it and
    its counterparts in other replicas (its column, `Mesh.expert_column`) hold. Megatron's dispatcher
    expects different tokens on each rank, as with sequence parallelism, and would compute each token once per rank. The
    sum has no gradient, because Megatron trains experts with sequence parallelism only.
    """

    def __init__(self, num_local: int, config: TransformerConfig, mesh: Mesh) -> None:
        column, folded = mesh.expert_column, mesh.layout.fold_size
        first = mesh.dp_rank % mesh.layout.expert_replicas * num_local
        column_config = copy.copy(config)
        column_config.num_moe_experts = num_local * mesh.layout.expert_replicas
        groups = ProcessGroupCollection(ep=column, expt_tp=None, tp_ep=column)
        super().__init__(num_local, [*range(first, first + num_local)], config=column_config, pg_collection=groups)
        experts = torch.arange(column_config.num_moe_experts * folded, device=host.device()).view(-1, folded, num_local)
        self._column_experts = experts[:, mesh.tp_rank // mesh.layout.etp].flatten() if folded > 1 else None
        self._tp_group = mesh.groups.tp

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        if self._column_experts is not None:
            routing_map, probs = routing_map[:, self._column_experts], probs[:, self._column_experts]
        tokens_and_probs: tuple[Tensor, Tensor] = super().dispatch_preprocess(hidden_states, routing_map, probs)
        return tokens_and_probs

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        output: Tensor = super().combine_postprocess(permutated_local_input_tokens)
        dist.all_reduce(output, group=self._tp_group)
        return output


class _Router(TopKRouter):
    """Megatron's router with a `gating` of its own: Megatron's calls Transformer Engine even if it is not installed.

    In fp32 it also routes, with the bias of sigmoids in a buffer: no gradient reaches it, and nothing updates it.
    Megatron would normalise the weights of sigmoids always, and score groups by another number of experts.

    Megatron makes the weight on the CPU and moves it in `gating`, so here it is moved at construction.
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/transformer/moe/moe_utils.py#L1192
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/transformer/moe/router.py#L53
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        experts: Experts,
        has_bias: bool = False,
    ) -> None:
        super().__init__(config, pg_collection)
        self._experts = experts
        if has_bias:
            self.bias = nn.Parameter(torch.zeros(experts.num_experts, dtype=config.params_dtype))
            self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if experts.router == "sigmoid":
            self.register_buffer("selection_bias", torch.zeros(experts.num_experts, dtype=torch.float32))
        self.to(host.device())

    def gating(self, input: Tensor) -> Tensor:
        if self._experts.routes_in_fp32:
            return F.linear(input.float(), self.weight.float())
        return F.linear(input, self.weight, self.bias)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights and selection of the experts of each token, [S * B, experts] each, from logits [S, B, experts]."""
        if self._experts.scales_inputs:
            logits = logits.flatten(0, 1)
            selected = logits.topk(self._experts.experts_per_token, dim=-1).indices
            weights = logits.gather(1, selected).float().sigmoid().to(logits.dtype)
            return _of_selected(selected, weights, logits)
        if not self._experts.routes_in_fp32:
            routed: tuple[Tensor, Tensor] = super().routing(logits, padding_mask)
            return routed
        logits = logits.flatten(0, 1)
        if self._experts.router == "sigmoid":
            scores = logits.sigmoid()
            eligible = scores + self.selection_bias
        else:
            scores = eligible = logits.softmax(-1)
        if self._experts.num_groups > 1:
            eligible = self._in_groups(eligible)
        selected = eligible.topk(self._experts.experts_per_token, dim=-1).indices
        weights = scores.gather(1, selected)
        if self._experts.normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + _SMALLEST_WEIGHT)
        return _of_selected(selected, weights * self._experts.weight_scale, scores)

    def _in_groups(self, scores: Tensor) -> Tensor:
        """The scores [tokens, experts], minus infinity outside of each token's groups: those whose best experts
        together have the largest scores."""
        groups = scores.unflatten(1, (self._experts.num_groups, -1))
        best = (
            groups.topk(self._experts.group_scorers, dim=-1)
            .values.sum(-1)
            .topk(self._experts.groups_per_token, dim=-1)
            .indices
        )
        is_outside = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(1, best, False)
        return groups.masked_fill(is_outside.unsqueeze(-1), -torch.inf).flatten(1)


def _of_selected(selected: Tensor, weights: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and selection of all experts, in the shape of `like` [tokens, experts], from the numbers and weights of
    each token's experts [tokens, k]."""
    all_weights = torch.zeros_like(like).scatter(1, selected, weights)
    return all_weights, torch.zeros_like(like, dtype=torch.bool).scatter(1, selected, True)


_SMALLEST_WEIGHT = 1e-20
"""Added to the sum of a token's weights before it divides them, as in transformers."""


def has_fused_gates(spec: ModelSpec, kernels: ChosenKernels) -> bool:
    """True if a fused kernel computes the gated activation of the MLP: for SwiGLU, except in experts."""
    return kernels.operators == "fused" and spec.activation == "silu" and not spec.experts


class _FusedGates(nn.Module):
    """The fused gated activation, in place of Transformer Engine's."""

    def __init__(self, config: TransformerConfig) -> None:  # noqa: ARG002 - megatron passes it
        from meshwright.runtime.kernels.layer_ops import silu_and_mul  # noqa: PLC0415 - needs Triton

        super().__init__()
        self._gated = silu_and_mul

    def forward(self, up: Tensor) -> Tensor:
        """The activation [S, B, F] of gate and up [S, B, 2 F]."""
        return self._gated(up)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Returns an empty state: it has no parameters."""
        return {}


class _Biased:
    """A linear that always has a bias; Megatron's setting would give a bias to every linear of the layer."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **{**options, "bias": True})


class _BiasedColumnParallelLinear(_Biased, ColumnParallelLinear): ...


class _BiasedRowParallelLinear(_Biased, RowParallelLinear): ...


class _BiasedExpertRows(_BiasedRowParallelLinear):
    """The second linear of an expert, whose outputs are summed over the tensor-parallel ranks that share the expert.

    Each of them adds its share of the bias, and has the whole gradient of it, since all have the gradient of the sum.
    """

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self._num_ranks = self.tp_group.size()
        # The dispatcher sums the outputs. Where there is one rank, Megatron would return a view, to which it then adds.
        self.explicit_expert_comm = True
        # Ranks that share an expert have the same bias, and others have other experts.
        self.bias.sequence_parallel = False
        set_tensor_model_parallel_attributes(self.bias, self._num_ranks == 1, 0, 1)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs [T, outputs] for inputs [T, inputs / tp], and this rank's share of the bias [outputs]."""
        output, bias = super().forward(inputs)
        return output, bias if self._num_ranks == 1 else _Share.apply(bias, self._num_ranks)


class _Share(torch.autograd.Function):
    """A tensor over a number of ranks; its gradient is that of the share."""

    @staticmethod
    def forward(_ctx: Any, whole: Tensor, num_ranks: int) -> Tensor:
        return whole / num_ranks

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _BiasedAdaptedColumns(_Biased, AdaptedColumnParallelLinear): ...


class _BiasedAdaptedRows(_Biased, AdaptedRowParallelLinear): ...


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, whose weight is stored minus the norm offset of its
    family (`ModelSpec.norm_offset`).

    Megatron's own norm does not support sequence parallelism, in which each rank has a part of the tokens and therefore
    of the weight's gradient; the `sequence_parallel` mark on the weight makes Megatron sum the parts.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.epsilon = eps
        self.weight = _parameter((hidden_size,), 1.0 - self.offset, config)

    def forward(self, hidden: Tensor) -> Tensor:
        """`hidden` [..., hidden], normalised, in the same shape and dtype."""
        if not self.offset:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.epsilon)
        # In fp32, because a small weight would be rounded away when 1 is added to it in bf16.
        weight = self.weight.float() + self.offset
        return F.rms_norm(hidden.float(), weight.shape, weight, self.epsilon).to(hidden.dtype)


class WholeNorm(nn.Module):
    """Root-mean-square norm over all heads of a token together, of which each tensor-parallel rank has a part."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, num_heads: int) -> None:
        """`hidden_size` is the size of one head, and `num_heads` counts those of all ranks."""
        super().__init__()
        self.epsilon, self._num_ranks = eps, config.tensor_model_parallel_size
        self._size = num_heads * hidden_size
        # Ranks have different parts of the weight, and whole sequences of their heads.
        self.weight = nn.Parameter(
            torch.ones(self._size // self._num_ranks, device=host.device(), dtype=config.params_dtype)
        )
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)
        self.tp_group: dist.ProcessGroup | None = None
        """The tensor-parallel ranks, set by the model."""

    def forward(self, heads: Tensor) -> Tensor:
        """`heads` [S, B, heads / tp, D], normalised, in the same shape and dtype."""
        flat = heads.flatten(2)
        wide = flat.float()
        squares = wide.square().sum(-1, keepdim=True)
        if self._num_ranks > 1:
            assert self.tp_group is not None
            # Both ways a sum over the ranks: the norm of a rank's heads depends on the heads of all.
            squares = reduce_from_tensor_model_parallel_region(squares, group=self.tp_group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self.tp_group)
        normed = wide * torch.rsqrt(squares / self._size + self.epsilon)
        return (self.weight.float() * normed).to(heads.dtype).view(heads.shape)

    def sharded_state_dict(self, *places: Any, **options: Any) -> dict[str, Any]:
        """The state for a checkpoint: the weight."""
        return shards_of_heads(self, self.tp_group, *places, **options)


class ScalarHead(nn.Module):
    """A head with one fp32 output per token, [S, B, 1], in place of Megatron's vocabulary output layer.

    Its inputs are hidden states [S, B, hidden], or this rank's part of the sequence: with sequence parallelism the
    outputs are gathered, not the hidden states.
    """

    def __init__(self, config: TransformerConfig, tp_group: dist.ProcessGroup) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = tp_group
        self.weight = _parameter((1, config.hidden_size), 0.0, config)

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """The outputs [S, B, 1] fp32, and None for the bias that Megatron's parallel linears return."""
        outputs = F.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            # Every rank continues with the same outputs, so only the gradient of its own part flows back.
            outputs = gather_from_sequence_parallel_region(
                outputs, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return outputs, None


def _parameter(shape: tuple[int, ...], value: float, config: TransformerConfig) -> nn.Parameter:
    """A weight that is replicated on all tensor-parallel ranks."""
    weight = nn.Parameter(torch.full(shape, value, device=host.device(), dtype=config.params_dtype))
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight
