"""One rank's shard of a model: a Megatron GPTModel with the layers of its family, and a vocabulary or scalar head.

Pipeline stages may have unequal numbers of layers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn

from meshwright.profiles.errors import require_none
from meshwright.profiles.experts import LatentAttention
from meshwright.profiles.layout import Layout, chunk_layers, layout_violations, unequal_layers_per_stage
from meshwright.profiles.model_shape import ModelSpec, run_violations
from meshwright.runtime.device import host
from meshwright.runtime.model.adapters import is_trained_parameter
from meshwright.runtime.model.attention import Packing, Rotary
from meshwright.runtime.model.context_parallel import num_padding_tokens, sequence_shard
from meshwright.runtime.model.hf_checkpoint import SELECTION_BIAS, global_name
from meshwright.runtime.model.kernel_choice import PLAIN, ChosenKernels
from meshwright.runtime.model.kv_cache import ContinuedRows
from meshwright.runtime.model.layers import (
    RMSNorm,
    ScalarHead,
    WholeNorm,
    block_of_layers,
    has_fused_gates,
    keep_tokens_apart,
)
from meshwright.runtime.model.logprobs import cap_logits
from meshwright.runtime.model.mesh import Mesh


class UnequalLayerLayout(PipelineParallelLayerLayout):
    """The number of layers of every stage, for a rank whose stage is an argument and not read from global state.

    Megatron's own class ignores a given stage and reads its global state:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/transformer/transformer_layer.py#L51
    """

    def __init__(self, counts: Sequence[int], pp_rank: int) -> None:
        stages = [["decoder"] * count for count in counts]
        stages[0].insert(0, "embedding")
        stages[-1].append("loss")
        super().__init__(stages, len(counts))
        self._pp_rank = pp_rank

    def get_num_layers_to_build(self, *args: Any, **kwargs: Any) -> int:
        return int(super().get_num_layers_to_build(*args, **{**kwargs, "pp_rank": self._pp_rank}))

    def get_layer_offset(self, *args: Any, **kwargs: Any) -> int:
        return int(super().get_layer_offset(*args, **{**kwargs, "pp_rank": self._pp_rank}))


def unequal_layer_layout(spec: ModelSpec, mesh: Mesh) -> UnequalLayerLayout | None:
    """The layer layout of a model with unequal stages; None if all stages have equally many layers."""
    counts = unequal_layers_per_stage(spec, mesh.layout.pp)
    return UnequalLayerLayout(counts, mesh.pp_rank) if counts else None


Recompute = Literal["none", "selective", "full"]
"""The activations that the backward pass recomputes: none, those of core attention, or those of whole layers."""

_RNGS = ("model-parallel-rng", "expert-parallel-rng")
"""The names of Megatron's random generators for the initialisation of weights."""


class Decoder(GPTModel):
    """The decoder layers of one pipeline stage, with the embedding on the first stage and the head on the last.

    In an interleaved pipeline it is one chunk of a stage: the embedding is on the first chunk of the first stage, the
    head on the last chunk of the last one.

    `decoder(tokens, lengths)` takes packed rows of these lengths, tokens [1, S] int64, on every stage. On the last
    stage it returns
    - logits [S, 1, V / tp] over this rank's shard of the padded vocabulary, minus infinity for padding, or
    - values [1, S] in fp32 if the model has a scalar head,
    and on the others the hidden states for the next stage.

    S may be any number: with sequence parallelism the tokens are padded to a multiple of tp and the output is cut back.
    With context parallelism the output is that of this rank's shard of the rows. With `cache` the rows continue those
    in the cache; with `ends_only` the head is applied to the last token of each row only, [B, 1, V / tp], without
    sequence parallelism.
    """

    def __init__(
        self, spec: ModelSpec, mesh: Mesh, config: TransformerConfig, chunk: int = 0, kernels: ChosenKernels = PLAIN
    ) -> None:
        layout = mesh.layout
        layers = chunk_layers(spec, layout.pp, mesh.pp_rank, layout.vpp)[chunk]
        is_first = mesh.is_first_stage and chunk == 0
        is_last = mesh.is_last_stage and chunk == layout.vpp - 1
        super().__init__(
            config=config,
            transformer_layer_spec=block_of_layers(spec, layers, kernels, config),
            vocab_size=spec.padded_vocab_size,
            max_sequence_length=spec.max_positions,
            pre_process=is_first,
            # With a scalar head the vocabulary's output layer would be allocated only to be replaced.
            post_process=is_last and not spec.scalar_head,
            share_embeddings_and_output_weights=spec.tied_embeddings and not spec.scalar_head,
            position_embedding_type="none",
            pg_collection=mesh.groups,
            vp_stage=chunk if layout.vpp > 1 else None,
        )
        self.spec = spec
        self.layers = layers
        self.mesh = mesh
        self.kernels = kernels
        self.rotary = Rotary(spec, host.device())
        self.cache_rotary = Rotary(spec, host.device(), spec.cached_heads(layout.tp)) if spec.latent else self.rotary
        if is_last and spec.scalar_head:
            self._attach_scalar_head()
        for module in self.modules():
            if isinstance(module, WholeNorm):
                module.tp_group = mesh.groups.tp
        if spec.experts and layout.tp > 1 and not layout.sp:
            for layer in self.decoder.layers:
                if isinstance(layer.mlp, MoELayer):
                    keep_tokens_apart(layer.mlp, mesh)
        if is_first and spec.embedding_scale != 1.0:
            self.embedding.register_forward_hook(self._scale_embedding)
        if is_first and spec.adapter and config.recompute_granularity == "full":
            self.embedding.register_forward_hook(_require_gradient)

    def forward(
        self, tokens: Tensor, lengths: Sequence[int], cache: ContinuedRows | None = None, *, ends_only: bool = False
    ) -> Tensor:
        """The output of this stage for tokens [1, S], packed rows of these lengths; see the class."""
        shard, like = sequence_shard(lengths, self.mesh), next(self.parameters())
        if shard:
            assert cache is None, "there is no cache with context parallelism"
            tokens = shard.select(tokens[0]).unsqueeze(0)
        length = tokens.shape[1]
        tail = num_padding_tokens(length, self.mesh.layout)
        if shard:
            packing = self.rotary.pack_shard(shard, like, tail=tail)
        else:
            rotary = self.rotary if cache is None else self.cache_rotary
            packing = rotary.pack(lengths, like, tail=tail, cache=cache, ends_only=ends_only)
        output: Tensor = super().forward(
            input_ids=F.pad(tokens, (0, tail)), position_ids=None, attention_mask=None, packed_seq_params=packing
        )
        if not self.post_process or not tail:
            return output
        return output[:, :length] if self.spec.scalar_head else output[:length]

    def _postprocess(self, hidden_states: Tensor, *, packed_seq_params: Packing, **_: Any) -> Tensor:
        """Applies the head to hidden states [S, 1, hidden], without Megatron's transposed copy of the logits.

        The ignored arguments are for Megatron's own losses.
        """
        if not self.post_process:
            return hidden_states
        if packed_seq_params.ends is not None:
            hidden_states = hidden_states[packed_seq_params.ends]
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        output, _ = self.output_layer(hidden_states, weight=tied)
        if self.spec.scalar_head:
            return output.squeeze(2).transpose(0, 1).contiguous()
        if self.spec.logits_scale != 1.0:
            output = output * self.spec.logits_scale
        if (num_columns := self._num_token_columns()) < output.shape[-1]:
            output[..., num_columns:] = -torch.inf
        return cap_logits(output, self.spec.logits_cap, num_columns) if self.spec.logits_cap else output

    def tie_embeddings_and_output_weights_state_dict(
        self, sharded_state_dict: dict[str, Any], output_layer_weight_key: str, first_stage_word_emb_key: str, _: Any
    ) -> None:
        """Adds the last stage's copy of tied embeddings to the state as a replica of the first stage's.

        Megatron's own version needs the global data-parallel rank:
        https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/models/common/language_module/language_module.py#L352
        """
        if self.post_process and not self.pre_process:
            sharded_state_dict[output_layer_weight_key] = make_tp_sharded_tensor_for_checkpoint(
                tensor=self.shared_embedding_or_output_weight(),
                key=first_stage_word_emb_key,
                replica_id=(1, 0, self.mesh.dp_rank),  # a copy, which is not written
                allow_shape_mismatch=True,
                tp_group=self.mesh.groups.tp,
                dp_cp_group=self.mesh.groups.dp_cp,
            )

    def _num_token_columns(self) -> int:
        """Number of this rank's logits that belong to tokens; the others are padding of the vocabulary."""
        columns = self.spec.padded_vocab_size // self.mesh.layout.tp
        return min(max(self.spec.vocab_size - self.mesh.tp_rank * columns, 0), columns)

    def _attach_scalar_head(self) -> None:
        self.post_process = self.decoder.post_process = True
        self.decoder.final_layernorm = RMSNorm(self.config, self.config.hidden_size, self.config.layernorm_epsilon)
        self.output_layer = ScalarHead(self.config, self.mesh.groups.tp)

    def _scale_embedding(self, _module: Any, _inputs: Any, embedded: Tensor) -> Tensor:
        return embedded * float(torch.tensor(self.spec.embedding_scale, dtype=embedded.dtype))


def _require_gradient(module: nn.Module, _inputs: Any, embedded: Tensor) -> Tensor:
    """Marks the output of frozen embeddings, since a recomputed layer has gradients only if its input requires one."""
    return embedded.requires_grad_() if module.training and torch.is_grad_enabled() else embedded


class Interleaved(nn.ModuleList):
    """The chunks of one rank in an interleaved pipeline, in which a micro-batch passes every rank several times."""

    def __init__(self, chunks: Sequence[Decoder]) -> None:
        super().__init__(chunks)
        self.chunks = tuple(chunks)
        self.config: TransformerConfig = chunks[0].config
        self.spec = chunks[0].spec


ModelChunks: TypeAlias = Decoder | Interleaved
"""One rank's shard of a model: a decoder, or several chunks of an interleaved pipeline."""


def model_chunks_of(model: ModelChunks) -> tuple[Decoder, ...]:
    """The chunks of a model shard, in the order in which a micro-batch passes them."""
    return model.chunks if isinstance(model, Interleaved) else (model,)


def named_global_parameters(model: ModelChunks) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields this rank's parameters, named with the numbers of layers and experts in the whole model."""
    for chunk in model_chunks_of(model):
        num_experts = chunk.spec.experts.num_experts if chunk.spec.experts else 0
        first_expert = chunk.mesh.ep_rank * (num_experts // chunk.mesh.layout.ep)
        for name, parameter in chunk.named_parameters():
            yield global_name(name, chunk.layers.start, first_expert), parameter


def named_global_constants(model: ModelChunks) -> Iterator[tuple[str, Tensor]]:
    """Yields what this rank reads from a checkpoint and nothing trains, [...] each, named as parameters are: the
    biases by which routers select experts."""
    for chunk in model_chunks_of(model):
        for name, buffer in chunk.named_buffers():
            if name.endswith(SELECTION_BIAS):
                yield global_name(name, chunk.layers.start), buffer


def build_model(
    spec: ModelSpec,
    mesh: Mesh,
    *,
    dtype: torch.dtype = torch.float32,
    recompute: Recompute = "none",
    trainable: bool = False,
    seed: int = 0,
    kernels: ChosenKernels = PLAIN,
) -> ModelChunks:
    """Builds this rank's shard of `spec` on `mesh`, with random weights from `seed`; members of the mesh call it.

    A model that is not trainable has no gradients and is in evaluation mode. If the model has an adapter, only its
    parameters and a scalar head have gradients, and the adapter is zero until `init_adapter`, a checkpoint or a refit
    sets it.
    Raises BadInput for a layout that does not divide the model, and for a model that can only be planned.
    """
    require_none((*layout_violations(mesh.layout, spec), *run_violations(spec)))
    host.install()
    if mesh.layout.sp and parallel_state._GLOBAL_MEMORY_BUFFER is None:
        # The only part of megatron's global state that sequence parallelism needs: a buffer.
        parallel_state._set_global_memory_buffer()
    generator = get_cuda_rng_tracker()
    generator.reset()
    for index, name in enumerate(_RNGS):  # seeds of generators must differ
        generator.add(name, index * 2**32 + 1024 * seed + mesh.layout.tp * mesh.pp_rank + mesh.tp_rank)
    config = _config(spec, mesh, dtype, recompute, kernels)
    with _seeded(len(_RNGS) * 2**32 + 1024 * seed + mesh.pp_rank):  # routers, and other weights that are not sharded
        chunks = [Decoder(spec, mesh, config, chunk, kernels) for chunk in range(mesh.layout.vpp)]
    model = chunks[0] if len(chunks) == 1 else Interleaved(chunks)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable and is_trained_parameter(spec, name))
    model.train(trainable)
    return model


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds torch's own generator, and restores its state at the end."""
    with torch.random.fork_rng([torch.cuda.current_device()] if host.on_cuda() else []):
        torch.manual_seed(seed)
        yield


def _config(
    spec: ModelSpec, mesh: Mesh, dtype: torch.dtype, recompute: Recompute, kernels: ChosenKernels
) -> TransformerConfig:
    layout = mesh.layout
    return (MLATransformerConfig if spec.latent else TransformerConfig)(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_epsilon,
        layernorm_zero_centered_gamma=spec.norm_offset == 1.0,
        # Megatron would sum gradients over the ranks also for a norm over all heads, of which each rank has its part.
        qk_layernorm=spec.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        attention_output_gate=spec.attention_gate,
        # Megatron stores layers that differ under numbers of their own.
        linear_attention_freq=[kind.mixer == "linear" for kind in spec.layer_kinds] if spec.linear else None,
        gated_linear_unit=True,
        **_activation(spec),
        bias_activation_fusion=False,
        use_te_activation_func=has_fused_gates(spec, kernels),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        # With batched p2p two stages would exchange two messages at once, and mistake one for the other:
        # https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/training/arguments.py
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        context_parallel_size=layout.cp,
        pipeline_model_parallel_layout=unequal_layer_layout(spec, mesh),
        pipeline_dtype=dtype,
        sequence_parallel=layout.sp,
        variable_seq_lengths=True,
        cuda_graph_scope=[],  # the default causes a warning
        # Megatron requires it for sequences of different lengths, even without experts.
        moe_token_dispatcher_type="alltoall",
        # Losses are already divided by a global count, so gradients are summed and never averaged.
        calculate_per_token_loss=True,
        **_RECOMPUTE[recompute],
        **_routing(spec, layout),
        **_latent_sizes(spec.latent),
    )


def _latent_sizes(latent: LatentAttention | None) -> dict[str, Any]:
    """The sizes of latent attention. This project's rotary embedding is used, not Megatron's."""
    if latent is None:
        return {}
    return {
        "q_lora_rank": latent.query_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rope_type": "rope",
    }


def _routing(spec: ModelSpec, layout: Layout) -> dict[str, Any]:
    """The settings of the router: no tokens are dropped, and there is no auxiliary loss."""
    if not spec.experts:
        return {}
    with_experts = [spec.expert_layers_between(layer, layer + 1) for layer in range(spec.num_layers)]
    return {
        "num_moe_experts": spec.experts.num_experts,
        # Megatron stores layers that differ under numbers of their own.
        "moe_layer_freq": 1 if all(with_experts) else with_experts,
        "moe_ffn_hidden_size": spec.experts.ffn_size,
        "moe_router_topk": spec.experts.experts_per_token,
        "moe_router_pre_softmax": not spec.experts.normalized,
        "moe_router_load_balancing_type": "none",
        "moe_shared_expert_intermediate_size": spec.experts.shared_ffn_size or None,
        "moe_shared_expert_gate": spec.experts.shared_gate,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


_RECOMPUTE: dict[Recompute, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
"""Megatron's settings for each kind of recomputation."""


def _activation(spec: ModelSpec) -> dict[str, Any]:
    """The activation of the gates, and what is done to gate and up projection before they are multiplied."""
    experts = spec.experts
    if not experts or not experts.clamp:
        return {"activation_func": F.silu if spec.activation == "silu" else _gelu_tanh}
    return {
        "activation_func": functools.partial(_sloped_silu, slope=experts.gate_slope),
        "activation_func_clamp_value": experts.clamp,
        "glu_linear_offset": experts.up_offset,
    }


def _sloped_silu(inputs: Tensor, *, slope: float) -> Tensor:
    return inputs * torch.sigmoid(inputs * slope)


def _gelu_tanh(inputs: Tensor) -> Tensor:
    return F.gelu(inputs, approximate="tanh")
