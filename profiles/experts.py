"""Mixture of experts and multi-head latent attention: the sizes of decoders that have them, and the load of experts.

The sizes are those of Hugging Face configs. The load imbalance of routers is a power law of expert popularity, with
constants from `data/routing.yaml`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import as_file, files
from statistics import NormalDist
from typing import Any, Generic, Literal, NamedTuple, TypeAlias

import numpy as np
from pydantic import Field

from meshwright.profiles.documents import Document, read_yaml
from meshwright.profiles.elementwise import N, maximum, minimum, where
from meshwright.profiles.errors import BadInput
from meshwright.profiles.model_parts.family_keys import FAMILIES
from meshwright.profiles.model_parts.hf_config import MOST_LAYERS, count_or_zero, flag, number, required_size

Router: TypeAlias = Literal["softmax", "sigmoid"]
"""The score of an expert: its share in the softmax of all, or a sigmoid of its own. With sigmoids, experts are selected
by their score plus a bias of the expert, which is not trained (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)."""

Balance: TypeAlias = Literal["auxiliary_loss", "forced"]
"""The means that keep the load of experts even: a loss during training, or a benchmark that routes at random."""


class _Popularity(NamedTuple, Generic[N]):
    """Popularity of experts over its mean: the least, and the variance."""

    least: N
    variance: N


class Routing(Document):
    """The popularity of experts.

    By itself it is a power law: the number x of tokens per expert has a density proportional to x^-exponent, between 1
    and `reach` times the number of all tokens. With a loss that balances experts, its relative variance is at most
    `balanced_variance`. With forced balance it is 0, and loads differ by chance alone.
    """

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
        return self._popularity(num_tokens, balance).variance

    def selected_share(self, num_tokens: N, experts_per_token: int, num_experts: int, balance: Balance | None) -> N:
        """Return the expected share of experts that at least one of `num_tokens` tokens selects.

        An expert of popularity w has a Poisson number of copies of mean w x (copies per expert). Popularities are taken
        for the least one plus a gamma variable with the law's variance, so that the numbers of copies are negative
        binomial and the share has a closed form (Greenwood and Yule, J. R. Stat. Soc. 83(2), 1920).
        """
        if experts_per_token == num_experts:
            return 1.0 + 0 * num_tokens
        least, variance = self._popularity(num_tokens, balance)
        copies = -math.log1p(-experts_per_token / num_experts) * num_tokens
        varied, above = variance > 0, 1 - least
        spread = where(varied, variance / (above * above), 1.0 + 0 * num_tokens)
        uneven: N = (1 + copies * above * spread) ** (-1 / spread) * math.e ** (-copies * least)
        unselected: N = where(varied, uneven, math.e**-copies)
        return 1 - unselected

    def _popularity(self, num_tokens: N, balance: Balance | None) -> _Popularity[N]:
        if balance == "forced":
            return _Popularity(0 * num_tokens, 0 * num_tokens)
        spreads = self.reach * num_tokens > 1
        upper, power = where(spreads, self.reach * num_tokens, 2.0 + 0 * num_tokens), 1 - self.exponent
        upper_power: N = upper**power
        # Moments 0, 1 and 2 of x^-exponent from 1 to `upper`, whose density is not normalised.
        moment_0, moment_1, moment_2 = (
            (upper_power - 1) / power,
            (upper_power * upper - 1) / (power + 1),
            (upper_power * upper * upper - 1) / (power + 2),
        )
        variance = where(spreads, maximum(moment_2 * moment_0 / (moment_1 * moment_1) - 1, 0.0), 0 * num_tokens)
        if balance:
            return _Popularity(0 * num_tokens, minimum(variance, self.balanced_variance))
        return _Popularity(where(spreads, moment_0 / moment_1, 0 * num_tokens), variance)


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
    """Routed experts: MLPs of which a router selects a few for each token, in all layers after the dense ones unless
    `ModelSpec.layer_kinds` says otherwise.

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
    gated: bool = True  # gate, up and down projections; False: up and down only (Nemotron-H)
    router: Router = "softmax"
    fp32_softmax: bool = False  # a softmax router computes its logits in fp32 (DeepSeek-V2)
    num_groups: int = 1  # equal groups of experts, of which a token is routed to the best `groups_per_token`
    groups_per_token: int = 1
    group_scorers: int = 2  # the score of a group is the sum of this many of its largest scores
    weight_scale: float = 1.0  # multiplies the weights of a token's experts
    scales_inputs: bool = False  # weights are sigmoids of the logits, and multiply the inputs of experts (Llama 4)
    clamp: float = 0.0  # gates are at most this, and up projections at most this in size (gpt-oss); 0: no limit
    gate_slope: float = 1.0  # a gate x is x sigmoid(gate_slope x)
    up_offset: float = 0.0  # is added to the up projection before the gate multiplies it

    @property
    def routes_in_fp32(self) -> bool:
        """True if the router computes its logits in fp32, as all with sigmoids do."""
        return self.fp32_softmax or self.router == "sigmoid"

    @property
    def num_matrices(self) -> int:
        """Matrices of one expert."""
        return 2 + self.gated

    def active_ffn_size(self, imbalance: float = 1.0) -> float:
        """MLP width per token, on a rank whose routed experts have `imbalance` times the mean load."""
        return imbalance * self.experts_per_token * self.ffn_size + self.shared_ffn_size

    def params(self, hidden_size: int, *, has_bias: bool = False) -> int:
        """Parameters of router, shared and routed experts in one layer; all but the shared may have biases."""
        router = hidden_size * (self.num_experts + self.shared_gate) + self.num_experts * has_bias
        shared = self.num_matrices * hidden_size * self.shared_ffn_size
        return router + shared + self.routed_params(hidden_size, has_bias=has_bias)

    def routed_params(self, hidden_size: int, *, has_bias: bool = False) -> int:
        """Parameters of the routed experts in one layer."""
        biases = ((1 + self.gated) * self.ffn_size + hidden_size) * has_bias
        return self.num_experts * (self.num_matrices * hidden_size * self.ffn_size + biases)

    def active_params(self, hidden_size: int) -> int:
        """Active matrix parameters per token in one layer."""
        networks = self.num_matrices * hidden_size * (self.experts_per_token * self.ffn_size + self.shared_ffn_size)
        return networks + hidden_size * (self.num_experts + self.shared_gate)

    def num_selected(self, num_tokens: N) -> N:
        """Expected number of experts that at least one of `num_tokens` tokens selects."""
        share = routing().selected_share(num_tokens, self.experts_per_token, self.num_experts, self.balance)
        return self.num_experts * share

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
    `query_rank` is 0 if queries have no low-rank projection. With an `indexer`, a token attends only to those that it
    selects.
    """

    query_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    indexer: Indexer | None = None

    @property
    def cached_size(self) -> int:
        """Elements per token in the KV cache of one layer, replicated on every rank."""
        return self.vector_size + (self.indexer.head_dim if self.indexer else 0)

    @property
    def vector_size(self) -> int:
        """Elements of the latent vector of a token and its rotary key."""
        return self.kv_rank + self.rope_dim

    def linears(self, hidden_size: int, num_heads: int) -> tuple[tuple[int, int], ...]:
        """The (input size, output size) of each projection.

        Down-projections from the hidden state are replicated on each rank and fused into one.
        """
        # An indexer reads the low-rank queries, so that models that have one also have a `query_rank`.
        indexing = self.indexer.linears(hidden_size, self.query_rank) if self.indexer else ()
        queries, expanded = num_heads * (self.nope_dim + self.rope_dim), num_heads * (self.nope_dim + self.value_dim)
        output = (num_heads * self.value_dim, hidden_size)
        if not self.query_rank:
            return (hidden_size, queries), (hidden_size, self.vector_size), (self.kv_rank, expanded), output
        down = (hidden_size, self.query_rank + self.vector_size)
        return down, (self.query_rank, queries), (self.kv_rank, expanded), output, *indexing

    @property
    def norm_params(self) -> int:
        # The indexer normalises its key by a LayerNorm, which has a weight and a bias.
        indexing = 2 * self.indexer.head_dim if self.indexer else 0
        return self.query_rank + self.kv_rank + indexing


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """The selection of the tokens that a token attends to (DeepSeek-V3.2, arXiv:2512.02556, section 2.1).

    Each of its heads scores every cached token by one shared key; the `num_tokens` tokens with the largest weighted sum
    are attended to. Every rank holds all of it.
    """

    num_heads: int
    head_dim: int
    num_tokens: int

    def linears(self, hidden_size: int, query_rank: int) -> tuple[tuple[int, int], ...]:
        """The (input size, output size) of its projections: queries; the key and the weights of heads."""
        return (query_rank, self.num_heads * self.head_dim), (hidden_size, self.head_dim + self.num_heads)


RUN_EXPERT_FAMILIES = (
    "Mixtral",
    "Qwen2Moe",
    "Qwen3Moe",
    "Qwen3Next",
    "Qwen3_5Moe",
    "Glm4Moe",
    "MiniMaxM2",
    "DeepseekV2",
    "DeepseekV3",
    "GptOss",
    "Llama4",
)
"""MoE families that the runtime can run."""

_TOPK_METHODS = ("greedy", "group_limited_greedy")
"""Ways to select experts: among all of them, or among those of the best groups."""

_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def experts_from_config(config: Mapping[str, Any], family: str, name: str) -> Experts:
    """Return the experts that a Hugging Face config with all defaults filled in describes.

    Raises BadInput for an unsupported pattern of layers or an invalid size.
    """
    parts = FAMILIES[family].parts
    num_experts = next(required_size(config, key, name) for key in _COUNTS if key in config)
    ffn_size = required_size(config, parts.expert_size, name)
    group_scorers = 1 if parts.grouped_softmax else 2
    if parts.grouped_softmax and config.get("norm_topk_prob"):
        raise BadInput(
            f"model {name}: config key 'norm_topk_prob' is true, which {family} models ignore; remove the key."
        )
    num_groups, groups_per_token = _groups_from_config(config, num_experts, group_scorers, name)
    return Experts(
        num_experts=num_experts,
        experts_per_token=required_size(config, "num_experts_per_tok", name),
        ffn_size=ffn_size,
        shared_ffn_size=_shared_ffn_size(config, family, ffn_size, name),
        shared_gate=parts.shared_gate,
        num_dense_layers=min(
            count_or_zero(config, "first_k_dense_replace", name), required_size(config, "num_hidden_layers", name)
        ),
        normalized=not parts.grouped_softmax and _is_normalized(config, name, default=parts.normalizes_experts),
        gated=parts.gated_mlp,
        scales_inputs=parts.scales_inputs,
        router="sigmoid" if parts.sigmoid_router else "softmax",
        fp32_softmax=parts.grouped_softmax,
        num_groups=num_groups,
        groups_per_token=groups_per_token,
        group_scorers=group_scorers,
        weight_scale=number(config, "routed_scaling_factor", name) if "routed_scaling_factor" in config else 1.0,
        **_clamped_gates(config, name),
    )


def _clamped_gates(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The clamp, slope and offset of the activation of experts in families that have the keys.

    Raises BadInput for a limit of 0, with which nothing passes.
    """
    if "swiglu_limit" not in config:
        return {}
    limit = number(config, "swiglu_limit", name)
    if not limit:
        raise BadInput(f"model {name}: config key 'swiglu_limit' is {limit:g}; it must be above 0.")
    return {"clamp": limit, "gate_slope": number(config, "swiglu_alpha", name), "up_offset": 1.0}


def _groups_from_config(config: Mapping[str, Any], num_experts: int, group_scorers: int, name: str) -> tuple[int, int]:
    """The number of groups of experts and of groups per token.

    A group is scored by its `group_scorers` best experts. There is one group in families without the key, and without
    the method that uses it.
    """
    method = config.get("topk_method", "group_limited_greedy")
    if method not in _TOPK_METHODS:
        raise BadInput(
            f"model {name}: config key 'topk_method' is {method!r}; known methods are {' and '.join(_TOPK_METHODS)}."
        )
    if "n_group" not in config or method == "greedy":
        return 1, 1
    num_groups, per_token = required_size(config, "n_group", name), required_size(config, "topk_group", name)
    selected = required_size(config, "num_experts_per_tok", name)
    is_small = num_groups > 1 and num_experts < group_scorers * num_groups
    if num_experts % num_groups or is_small or per_token > num_groups:
        raise BadInput(
            f"model {name}: its {num_experts} experts form n_group={num_groups} groups, of which a token uses "
            f"topk_group={per_token}; groups must be equal, of {group_scorers} or more experts, and no fewer than "
            "topk_group."
        )
    if selected * num_groups > num_experts * per_token:
        raise BadInput(
            f"model {name}: a token has {selected} experts, and its {per_token} groups have only "
            f"{num_experts * per_token // num_groups}; lower num_experts_per_tok or raise topk_group."
        )
    return num_groups, per_token


def _shared_ffn_size(config: Mapping[str, Any], family: str, ffn_size: int, name: str) -> int:
    """Total width of the shared experts; Llama 4 has no key for it, and one shared expert as wide as a routed one."""
    if family == "Llama4":
        return ffn_size
    return (
        count_or_zero(config, "shared_expert_intermediate_size", name)
        or count_or_zero(config, "moe_shared_expert_intermediate_size", name)
        or ffn_size * count_or_zero(config, "n_shared_experts", name)
    )


def _is_normalized(config: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Whether the weights of a token's experts sum to one; `default` for a family without the key."""
    if "norm_topk_prob" not in config:
        return default
    return config["norm_topk_prob"] is not None and flag(config, "norm_topk_prob", name)


def expert_layers_from_config(config: Mapping[str, Any], experts: Experts, name: str) -> frozenset[int]:
    """Return the numbers of the layers with experts that a Hugging Face config with all defaults filled in describes.

    Raises BadInput for a list of layers that is not one.
    """
    num_layers, dense = required_size(config, "num_hidden_layers", name), _listed(config, "mlp_only_layers", name)
    if num_layers > MOST_LAYERS:
        raise BadInput(f"model {name}: config key 'num_hidden_layers' is above {MOST_LAYERS}; no model has so many.")
    if "interleave_moe_layer_step" in config and config.get("moe_layers") is not None:
        return frozenset(_listed(config, "moe_layers", name))
    keys = [key for key in ("decoder_sparse_step", "interleave_moe_layer_step") if key in config]
    step = required_size(config, keys[0], name) if keys else 1
    types = config.get("mlp_layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != num_layers or not {*map(str, types)} <= {"dense", "sparse"}:
            raise BadInput(
                f"model {name}: config key 'mlp_layer_types' must list dense or sparse for each of the {num_layers} "
                "layers."
            )
        return frozenset(number for number in range(num_layers) if types[number] == "sparse")
    first = experts.num_dense_layers
    return frozenset(n for n in range(first, num_layers) if (n + 1) % step == 0 and n not in dense)


def _listed(config: Mapping[str, Any], key: str, name: str) -> list[int]:
    """A list of layer numbers, empty if the key is missing or null."""
    listed = config.get(key) or []
    if not isinstance(listed, list) or not all(isinstance(number, int) for number in listed):
        raise BadInput(f"model {name}: config key {key!r} is {listed!r}; it must be a list of layer numbers.")
    return listed


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
        indexer=_indexer_from_config(config, name) if "index_topk" in config else None,
    )


def _indexer_from_config(config: Mapping[str, Any], name: str) -> Indexer:
    return Indexer(
        num_heads=required_size(config, "index_n_heads", name),
        head_dim=required_size(config, "index_head_dim", name),
        num_tokens=required_size(config, "index_topk", name),
    )
