"""What replaces the plain MLP and the plain attention of a decoder: experts with a router, and latent attention.

The sizes are those of Hugging Face configs of Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2, DeepSeek-V3 and gpt-oss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwright.profiles.errors import BadInput
from meshwright.profiles.model_parts.completed_config import count_or_none, flag, required_size
from meshwright.profiles.routing import routing


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Gated feed-forward networks of which a router picks a few for each token, in all layers but the first ones.

    `shared_ffn_size` is the width of those that every token passes, side by side; 0 when there are none.
    """

    num_experts: int
    experts_per_token: int
    ffn_size: int
    shared_ffn_size: int = 0
    shared_gate: bool = False  # the shared ones are weighted by a gate of their own (Qwen2-MoE)
    num_dense_layers: int = 0  # layers at the bottom that have one plain MLP
    normalized: bool = True  # the weights of a token's experts sum to one

    def active_ffn_size(self, busiest: float = 1.0) -> float:
        """Width of all that one token passes, on a rank with `busiest` times the mean of copies."""
        return busiest * self.experts_per_token * self.ffn_size + self.shared_ffn_size

    def params(self, hidden_size: int, *, has_bias: bool = False) -> int:
        """Parameters of a layer's router, shared network and experts; a bias is the router's and each expert's."""
        router = hidden_size * (self.num_experts + self.shared_gate) + self.num_experts * has_bias
        return router + 3 * hidden_size * self.shared_ffn_size + self.routed_params(hidden_size, has_bias=has_bias)

    def routed_params(self, hidden_size: int, *, has_bias: bool = False) -> int:
        """Of these, the parameters in experts among which the router picks."""
        biases = (2 * self.ffn_size + hidden_size) * has_bias
        return self.num_experts * (3 * hidden_size * self.ffn_size + biases)

    def passed_params(self, hidden_size: int) -> int:
        """Parameters of the matrices that a token passes."""
        networks = 3 * hidden_size * (self.experts_per_token * self.ffn_size + self.shared_ffn_size)
        return networks + hidden_size * (self.num_experts + self.shared_gate)

    def touched(self, num_tokens: float) -> float:
        """Expected number of experts that this many tokens reach, when each picks among them evenly."""
        missed: float = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.num_experts * (1 - missed)

    def busiest(self, num_tokens: float, ep: int) -> float:
        """Copies of so many tokens that come to the busiest of `ep` ranks, over the mean of them all: see `Routing`."""
        return routing().busiest(num_tokens, self.experts_per_token, self.num_experts, ep)

    def shard(self, tp: int) -> Experts:
        """The experts that one of `tp` ranks holds: all of them, each cut along its width."""
        return replace(self, ffn_size=self.ffn_size // tp, shared_ffn_size=self.shared_ffn_size // tp)


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Keys and values expanded from one low-rank vector a token, which alone is cached beside a rotary key.

    Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1). `query_rank` is 0 when queries are
    projected at once.
    """

    query_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def cached_size(self) -> int:
        """Numbers that a token leaves in the cache of a layer, on every rank."""
        return self.kv_rank + self.rope_dim

    def products(self, hidden_size: int, num_heads: int) -> tuple[tuple[int, int], ...]:
        """Inner and outer size of the projections; those from the hidden state down to a rank are whole on each rank,
        and side by side."""
        queries, expanded = num_heads * (self.nope_dim + self.rope_dim), num_heads * (self.nope_dim + self.value_dim)
        last = (num_heads * self.value_dim, hidden_size)
        if not self.query_rank:
            return (hidden_size, queries), (hidden_size, self.cached_size), (self.kv_rank, expanded), last
        down = (hidden_size, self.query_rank + self.cached_size)
        return down, (self.query_rank, queries), (self.kv_rank, expanded), last

    @property
    def norm_params(self) -> int:
        return self.query_rank + self.kv_rank


EXPERT_FAMILIES = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "DeepseekV2", "DeepseekV3", "GptOss")
"""Families that are costed and planned."""

RUN_EXPERT_FAMILIES = ("Mixtral", "Qwen3Moe")
"""Those of them that the runtime builds."""

_PLAIN_NAMES = ("Mixtral", "GptOss")
"""Families that have no other MLP, and give the size of an expert as that of the MLP."""

_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def experts_from_config(config: Mapping[str, Any], family: str, name: str) -> Experts:
    """The experts that the keys of a completed Hugging Face config describe. Raises BadInput for a pattern of layers or
    a size that is not known here."""
    num_experts = next(required_size(config, key, name) for key in _COUNTS if key in config)
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise BadInput(
            f"model {name}: experts in some layers between others are not known; they must follow dense ones."
        )
    ffn_size = required_size(config, "intermediate_size" if family in _PLAIN_NAMES else "moe_intermediate_size", name)
    return Experts(
        num_experts=num_experts,
        experts_per_token=required_size(config, "num_experts_per_tok", name),
        ffn_size=ffn_size,
        shared_ffn_size=count_or_none(config, "shared_expert_intermediate_size", name)
        or ffn_size * count_or_none(config, "n_shared_experts", name),
        shared_gate=family == "Qwen2Moe",
        num_dense_layers=count_or_none(config, "first_k_dense_replace", name),
        normalized=family in _PLAIN_NAMES
        or (config["norm_topk_prob"] is not None and flag(config, "norm_topk_prob", name)),
    )


def latent_from_config(config: Mapping[str, Any], name: str) -> LatentAttention:
    """The latent attention that the keys of a completed Hugging Face config describe; raises BadInput for a size that
    is none."""
    if flag(config, "attention_bias", name):
        raise BadInput(f"model {name}: attention_bias of latent attention is not known; set it to false.")
    return LatentAttention(
        query_rank=count_or_none(config, "q_lora_rank", name),
        kv_rank=required_size(config, "kv_lora_rank", name),
        nope_dim=required_size(config, "qk_nope_head_dim", name),
        rope_dim=required_size(config, "qk_rope_head_dim", name),
        value_dim=required_size(config, "v_head_dim", name),
    )
