"""Mixture of experts and multi-head latent attention: the sizes of decoders that have them, and the load of experts.

The sizes are those of Hugging Face configs of Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2, DeepSeek-V3 and gpt-oss. The
load imbalance of routers is a power law of expert popularity, with constants from `data/routing.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import as_file, files
from statistics import NormalDist
from typing import Any, Literal, TypeAlias

import numpy as np
from pydantic import Field

from meshwright.profiles.documents import Document, read_yaml
from meshwright.profiles.elementwise import N, maximum, minimum, where
from meshwright.profiles.errors import BadInput
from meshwright.profiles.model_parts.hf_config import count_or_zero, flag, required_size

Balance: TypeAlias = Literal["auxiliary_loss", "forced"]
"""What keeps the load of experts even: a loss during training, or a benchmark that sends each token to random ones."""


class Routing(Document):
    """The popularity of experts. By itself it is a power law: the number x of tokens per expert has a density
    proportional to x^-exponent, between 1 and `reach` times the number of all tokens. A loss that balances experts
    leaves `balanced_variance` of it, and forced balance leaves chance alone."""

    exponent: float = Field(gt=1, lt=2)
    reach: float = Field(gt=0, le=1)
    balanced_variance: float = Field(ge=0, description="variance over the square of the mean, under a balancing loss")
    date: str
    source: str = Field(min_length=1)
    balanced_source: str = Field(min_length=1)

    def imbalance(
        self,
        num_tokens: N,
        experts_per_token: int,
        num_experts: int,
        ep: N | float,
        balance: Balance | None = None,
    ) -> N:
        """Return the load of the busiest of `ep` ranks, which together hold `num_experts` experts, over the mean load.

        Load is counted in token copies. A rank's load is a sum over its experts and approximately normal, so the
        busiest is the expected maximum of `ep` normals (Blom, Statistical Estimates and Transformed Beta-Variables,
        1958). An expert's load varies with its popularity and, for few tokens, by chance. The result is bounded by the
        load of a rank to which every token sends as many of its copies as possible.
        """
        is_uniform = (num_tokens <= 0) | (ep == 1)
        routed = where(is_uniform, 1.0, num_tokens)
        variance = self.variance(routed, balance) + num_experts / (routed * experts_per_token)
        spread: N = (variance * (ep - 1) / num_experts) ** 0.5
        upper_bound = minimum(ep + 0 * num_tokens, num_experts / experts_per_token)
        busiest = minimum(1 + _expected_maximum(ep + 0 * num_tokens) * spread, upper_bound)
        return where(is_uniform, 1.0, busiest)

    def variance(self, num_tokens: N, balance: Balance | None = None) -> N:
        """Return the variance of an expert's popularity over the square of its mean; 0 if no expert has more than one
        token."""
        if balance == "forced":
            return 0 * num_tokens
        spreads = self.reach * num_tokens > 1
        upper, power = where(spreads, self.reach * num_tokens, 2.0 + 0 * num_tokens), 1 - self.exponent
        upper_power: N = upper**power
        share, mean, square = (
            (upper_power - 1) / power,
            (upper_power * upper - 1) / (power + 1),
            (upper_power * upper * upper - 1) / (power + 2),
        )
        variance = where(spreads, maximum(square * share / (mean * mean) - 1, 0.0), 0 * num_tokens)
        return minimum(variance, self.balanced_variance) if balance else variance


@cache
def routing() -> Routing:
    """Return the routing distribution that the cost models use."""
    with as_file(files("meshwright.profiles") / "data" / "routing.yaml") as path:
        return read_yaml(Routing, path, "routing")


def _expected_maximum(number: N) -> N:
    """Expected maximum of `number` standard normals (Blom's approximation)."""
    if isinstance(number, np.ndarray):
        numbers, positions = np.unique(number, return_inverse=True)
        return np.array([_blom(float(one)) for one in numbers])[positions]
    return _blom(number)


@cache
def _blom(number: float) -> float:
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25))


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Routed experts: gated MLPs of which a router selects a few for each token, in all layers after the dense ones.

    `shared_ffn_size` is the total width of the shared experts, which every token passes through; 0 without any.
    """

    num_experts: int
    experts_per_token: int
    ffn_size: int
    shared_ffn_size: int = 0
    shared_gate: bool = False  # a gate weights the shared experts (Qwen2-MoE)
    num_dense_layers: int = 0  # first layers, which have one plain MLP
    balance: Balance | None = None  # what keeps the load of experts even; None: nothing but the router itself
    normalized: bool = True  # the weights of a token's experts sum to one

    def active_ffn_size(self, imbalance: float = 1.0) -> float:
        """MLP width per token, on a rank whose routed experts have `imbalance` times the mean load."""
        return imbalance * self.experts_per_token * self.ffn_size + self.shared_ffn_size

    def params(self, hidden_size: int, *, has_bias: bool = False) -> int:
        """Parameters of router, shared and routed experts in one layer; all but the shared may have biases."""
        router = hidden_size * (self.num_experts + self.shared_gate) + self.num_experts * has_bias
        return router + 3 * hidden_size * self.shared_ffn_size + self.routed_params(hidden_size, has_bias=has_bias)

    def routed_params(self, hidden_size: int, *, has_bias: bool = False) -> int:
        """Parameters of the routed experts in one layer."""
        biases = (2 * self.ffn_size + hidden_size) * has_bias
        return self.num_experts * (3 * hidden_size * self.ffn_size + biases)

    def active_params(self, hidden_size: int) -> int:
        """Active matrix parameters per token in one layer."""
        networks = 3 * hidden_size * (self.experts_per_token * self.ffn_size + self.shared_ffn_size)
        return networks + hidden_size * (self.num_experts + self.shared_gate)

    def num_selected(self, num_tokens: N) -> N:
        """Expected number of experts that at least one of `num_tokens` tokens selects, under uniform routing."""
        unselected: N = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.num_experts * (1 - unselected)

    def imbalance(self, num_tokens: N, ep: N | float) -> N:
        """Load of the busiest of `ep` ranks over the mean load, for `num_tokens` tokens: see `Routing.imbalance`."""
        return routing().imbalance(num_tokens, self.experts_per_token, self.num_experts, ep, self.balance)

    def shard(self, tp: int) -> Experts:
        """The experts on one of `tp` ranks: all of them, each sharded along its width."""
        return replace(self, ffn_size=self.ffn_size // tp, shared_ffn_size=self.shared_ffn_size // tp)


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Keys and values are expanded from one low-rank vector per token; only this vector and a rotary key are cached.
    `query_rank` is 0 if queries have no low-rank projection.
    """

    query_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def cached_size(self) -> int:
        """Elements per token in the KV cache of one layer, replicated on every rank."""
        return self.kv_rank + self.rope_dim

    def linears(self, hidden_size: int, num_heads: int) -> tuple[tuple[int, int], ...]:
        """The (input size, output size) of each projection.

        Down-projections from the hidden state are replicated on each rank and fused into one.
        """
        queries, expanded = num_heads * (self.nope_dim + self.rope_dim), num_heads * (self.nope_dim + self.value_dim)
        output = (num_heads * self.value_dim, hidden_size)
        if not self.query_rank:
            return (hidden_size, queries), (hidden_size, self.cached_size), (self.kv_rank, expanded), output
        down = (hidden_size, self.query_rank + self.cached_size)
        return down, (self.query_rank, queries), (self.kv_rank, expanded), output

    @property
    def norm_params(self) -> int:
        return self.query_rank + self.kv_rank


EXPERT_FAMILIES = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "DeepseekV2", "DeepseekV3", "GptOss")
"""MoE families that can be planned."""

RUN_EXPERT_FAMILIES = ("Mixtral", "Qwen3Moe")
"""MoE families that the runtime can run."""

_ALL_LAYERS_MOE = ("Mixtral", "GptOss")
"""MoE families without dense layers, whose configs give the expert size as `intermediate_size`."""

_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def experts_from_config(config: Mapping[str, Any], family: str, name: str) -> Experts:
    """Return the experts that a Hugging Face config with all defaults filled in describes.

    Raises BadInput for an unsupported pattern of layers or an invalid size.
    """
    num_experts = next(required_size(config, key, name) for key in _COUNTS if key in config)
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise BadInput(
            f"model {name}: dense layers that decoder_sparse_step or mlp_only_layers selects are not supported; set "
            "decoder_sparse_step to 1 and mlp_only_layers to []."
        )
    ffn_size = required_size(
        config, "intermediate_size" if family in _ALL_LAYERS_MOE else "moe_intermediate_size", name
    )
    return Experts(
        num_experts=num_experts,
        experts_per_token=required_size(config, "num_experts_per_tok", name),
        ffn_size=ffn_size,
        shared_ffn_size=count_or_zero(config, "shared_expert_intermediate_size", name)
        or ffn_size * count_or_zero(config, "n_shared_experts", name),
        shared_gate=family == "Qwen2Moe",
        num_dense_layers=count_or_zero(config, "first_k_dense_replace", name),
        normalized=family in _ALL_LAYERS_MOE
        or (config["norm_topk_prob"] is not None and flag(config, "norm_topk_prob", name)),
    )


def latent_from_config(config: Mapping[str, Any], name: str) -> LatentAttention:
    """Return the latent attention that a Hugging Face config with all defaults filled in describes.

    Raises BadInput for biases, which are not supported, or an invalid size.
    """
    if flag(config, "attention_bias", name):
        raise BadInput(f"model {name}: attention_bias of latent attention is not supported; set it to false.")
    return LatentAttention(
        query_rank=count_or_zero(config, "q_lora_rank", name),
        kv_rank=required_size(config, "kv_lora_rank", name),
        nope_dim=required_size(config, "qk_nope_head_dim", name),
        rope_dim=required_size(config, "qk_rope_head_dim", name),
        value_dim=required_size(config, "v_head_dim", name),
    )
