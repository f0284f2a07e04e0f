"""Reading of Hugging Face configs: defaults of the family, rotary embeddings and sliding windows.

A config that contradicts itself is refused; an accepted one describes the same model that transformers builds from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from meshwright.profiles.elementwise import N, floor, maximum, minimum
from meshwright.profiles.errors import BadInput, require_none, suggestion
from meshwright.profiles.model_parts.family_keys import FAMILIES, Family

_LARGEST, _LARGEST_NUMBER = 2**40, 1e30
"""Upper bounds on the sizes of a model and on other numbers of a config."""

MOST_LAYERS = 2**16
"""Upper bound on the layers of a model whose kinds are listed one by one."""

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""Keys in every config that transformers writes: without one the file is incomplete, and a default would be wrong."""

_EXPERT_SIZE = "moe_intermediate_size"
"""The size of an expert. A family with this key needs `intermediate_size` only for dense layers."""

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Keys for the number of experts, by family."""

_ABSENT: Mapping[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "qkv_bias": False,
    "use_qk_norm": False,
    "use_sliding_window": False,
    "use_bidirectional_attention": False,
    "partial_rotary_factor": 1,
    "moe_layer_freq": 1,
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "attention_multiplier": None,
    "logits_scaling": 1,
    "logit_scale": 1,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "clip_qkv": None,
    "per_layer_config": None,
    "query_pre_attn_scalar": None,
    "rotary_dim": None,
    "rope_local_base_freq": None,
    "attention_chunk_size": None,
    "no_rope_layers": None,
    "full_attention_interval": None,
    "sliding_window_pattern": None,
    "linear_num_value_heads": None,
    "hybrid_override_pattern": None,
    "layers_block_type": None,
    "mamba_num_heads": None,
    "moe_latent_size": None,
    "index_topk": None,
    "kv_lora_rank": None,
    "interleave_moe_layer_step": 1,
}
"""Keys that change models of some families, with the value that all other families compute with."""

_PRESENT: Mapping[str, frozenset[str]] = {
    "attention_bias": frozenset({"Qwen2"}),
    "qkv_bias": frozenset({"Qwen2"}),
    "use_qk_norm": frozenset({"Qwen3", "Qwen3Moe", "MiniMaxM2"}),
}
"""Families that always compute as if the key were true, without having it."""

_ACTIVATION_KEYS = ("hidden_act", "hidden_activation")

_KINDS = {bool: "true or false", int: "a positive integer", float: "a number", str: "a text"}


def complete_config(config: Mapping[str, Any], family: str, name: str) -> dict[str, Any]:
    """Return all keys that shape a model of the family, missing ones with their default in transformers.

    A default of None means that the value is derived from others. Raises BadInput for a config that contradicts itself,
    lacks a required size, or has null for a key that does not allow it.
    """
    known, with_aliases = FAMILIES[family], dict(config)
    require_none(_contradictions(config, family, known), f"model {name}")
    for alias, key in known.aliases.items():
        if with_aliases.get(key) is None and with_aliases.get(alias) is not None:
            with_aliases[key] = with_aliases[alias]
    values = {}
    for key, default in known.defaults.items():
        value = with_aliases.get(key, default)
        is_needed = key in _REQUIRED and not (key == "intermediate_size" and _EXPERT_SIZE in known.defaults)
        if (
            (is_needed and key not in with_aliases)
            or (key in known.required and value is None)
            or (key in with_aliases and value is None and not known.may_be_null(key))
        ):
            kind = _KINDS.get(type(default), "a number")
            raise BadInput(f"model {name}: config key {key!r} is {with_aliases.get(key)!r}; it must be {kind}.")
        values[key] = value
    return values


def _contradictions(config: Mapping[str, Any], family: str, known: Family) -> Iterator[str]:
    """One sentence for each contradiction between keys, and for each key that the family ignores."""
    counts = {key: config[key] for key in _EXPERT_COUNTS if config.get(key) is not None}
    if len({str(count) for count in counts.values()}) > 1 and not counts.keys().isdisjoint(known.defaults):
        yield f"{_both(counts)} are two numbers of experts; keep the one that the weights have."
    for key, absent in _ABSENT.items():
        value = config.get(key)
        if key in known.defaults or value is None:
            continue
        computed = True if family in _PRESENT.get(key, ()) else absent
        if isinstance(value, bool) is not isinstance(computed, bool) or value != computed:
            yield (
                f"config key {key!r} is {value!r}, which {family} models ignore; give the architecture that the "
                "weights were made for, or remove the key."
            )
    activation = activation_of(config, family)
    for key in _ACTIVATION_KEYS:
        alternative = config.get(key)
        if key != known.activation_key and alternative not in (None, activation):
            yield (
                f"config key {key!r} is {alternative!r}, and {family} models compute {known.activation_key!r}, which "
                f"is {activation!r}; give both the same value."
            )
    listed = config.get("layer_types")
    if "layer_types" not in known.defaults and isinstance(listed, list):
        all_slide = "sliding_window" in known.defaults and config.get("use_sliding_window", True)
        if {*map(str, listed)} != {"sliding_attention" if all_slide else "full_attention"}:
            yield (
                f"config key 'layer_types' lists {', '.join(sorted({*map(str, listed)}))}, and {family} models have "
                "the same attention in all layers; remove the key."
            )


def activation_of(config: Mapping[str, Any], family: str) -> Any:
    """Return the activation that transformers uses: early Gemma configs say "gelu" for the tanh approximation."""
    key = FAMILIES[family].activation_key
    activation = config.get(key, FAMILIES[family].defaults[key])
    return "gelu_pytorch_tanh" if family == "Gemma" and activation == "gelu" else activation


def _both(values: Mapping[str, Any]) -> str:
    return " and ".join(f"{key}={value!r}" for key, value in values.items())


def required_size(config: Mapping[str, Any], key: str, name: str) -> int:
    """Return the value of a key that must be a positive integer. Raises BadInput if it is not."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadInput(f"model {name}: config key {key!r} is {value!r}; it must be a positive integer.")
    if value > _LARGEST:
        raise BadInput(f"model {name}: config key {key!r} is above {_LARGEST}; no model is so large.")
    return value


def size_or(config: Mapping[str, Any], key: str, default: int, name: str) -> int:
    """Return a size, or `default` if it is null. Raises BadInput if it is not a positive integer."""
    return default if config.get(key) is None else required_size(config, key, name)


def count_or_zero(config: Mapping[str, Any], key: str, name: str) -> int:
    """Return a count, or 0 if it is missing or null. Raises BadInput if it is not an integer of 0 or more."""
    return 0 if config.get(key) in (None, 0) and config.get(key) is not False else required_size(config, key, name)


def number(config: Mapping[str, Any], key: str, name: str) -> float:
    """Return the value of a key that must be a number of 0 or more. Raises BadInput if it is not."""
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _LARGEST_NUMBER:
        raise BadInput(f"model {name}: config key {key!r} is {value!r}; it must be a number.")
    return float(value)


def flag(config: Mapping[str, Any], key: str, name: str, *, default: bool = False) -> bool:
    """Return the value of a boolean key, `default` if it is absent. Raises BadInput if it is not a boolean."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise BadInput(f"model {name}: config key {key!r} is {value!r}; it must be true or false.")
    return value


_RUNNABLE = ("default", "linear", "llama3", "yarn", "longrope")
_PLANNABLE = ("dynamic", "proportional")
"""Types of rotary embeddings that can be planned, because no cost depends on them, but not run."""

_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_PARTIAL = "partial_rotary_factor"

_MEANINGLESS_ROPE_KEYS = ("mrope_interleaved", "mrope_section")
"""How the positions of an image are rotated, which says nothing of text."""

_FORMS = ("rope_scaling", "rope_parameters")
"""Keys that may hold the parameters of the rotary embedding: the old and the new one of transformers."""

_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor")
_ORIGINAL = "original_max_position_embeddings"
_TRUNCATE = "truncate"
_LONGROPE_LISTS = ("short_factor", "long_factor")
_KEYS_OF_TYPE: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({*_LLAMA3_KEYS, _ORIGINAL}),
    "yarn": frozenset(
        {"factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", _TRUNCATE}
    ),
    "longrope": frozenset({"factor", _ORIGINAL, "attention_factor", *_LONGROPE_LISTS}),
}
"""Keys of the types of rotary embeddings that can be run, besides type, base and rotated share."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's scaling of the rotary frequencies (Llama 3 report, arXiv:2407.21783, section 3.4.2)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al., arXiv:2309.00071, section 3): frequencies with fewer than `beta_slow` periods in the original
    length are divided by `factor`, those with more than `beta_fast` unchanged, and those between interpolated.

    Cosines and sines are multiplied by `attention_factor`. With `truncates` the bounds are whole pairs of a head.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_positions: int
    attention_factor: float
    truncates: bool


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """All rotary frequencies are divided by `factor` (Chen et al., arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class LongScaling:
    """LongRoPE (Ding et al., arXiv:2402.13753): each rotary frequency is divided by a factor of its own, from one list
    for sequences of up to `original_max_positions` tokens and from another for longer ones.

    With either list, cosines and sines are multiplied by `attention_factor`. A sequence that grows past the original
    length would need its cached keys computed again, so a job uses one list for all of its sequences: the long one with
    `is_long`.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int
    attention_factor: float
    is_long: bool = False


RotaryScaling: TypeAlias = RopeScaling | YarnScaling | LinearScaling | LongScaling


class Rope(NamedTuple):
    """The base `theta`, the scaling of its frequencies, and the type if it can only be planned.

    Only the first `share` of a head is rotated. Layers with a sliding window have the base `local_theta`, unscaled. In
    latent attention the scaling multiplies the scores by `latent_score_factor`.
    """

    theta: float
    scaling: RotaryScaling | None = None
    planned_type: str = ""
    share: float = 1.0
    local_theta: float = 0.0
    latent_score_factor: float = 1.0


def rope_from_config(config: Mapping[str, Any], max_positions: int, family: str, name: str) -> Rope:
    """Return the rotary embedding described by the old keys (`rope_theta`, `rope_scaling`) or by `rope_parameters`.

    Raises BadInput if they contradict each other or the type is unknown.
    """
    known = FAMILIES[family]
    local_theta = _local_theta(config, known, name)
    forms = {key: _form(config, key, family, name) for key in _FORMS if config.get(key)}
    if len(forms) > 1 and len({str(sorted(form.items())) for form in forms.values()}) > 1:
        raise BadInput(
            f"model {name}: config keys 'rope_scaling' and 'rope_parameters' contradict each other, "
            f"{config['rope_scaling']} and {config['rope_parameters']}; keep the one that the model was trained with."
        )
    form = next(iter(forms.values()), None) or _completed(known.rope, config, family)
    theta = number(form, "rope_theta", name)
    if not theta:
        raise BadInput(f"model {name}: config key 'rope_theta' is {theta}; it must be above 0.")
    kind, share = form["rope_type"], _rotary_share(config, form, known, name)
    form = {key: value for key, value in form.items() if key != _PARTIAL}
    if known.parts.rope_types and kind not in known.parts.rope_types:
        raise BadInput(
            f"model {name}: {family} models have no rotary embedding of type {kind!r}; give one of "
            f"{', '.join(known.parts.rope_types)}."
        )
    if kind == "yarn" and "longrope" in known.parts.rope_types:
        kind = "longrope"  # which was called yarn at first, and is read so
    if kind in _PLANNABLE:
        return Rope(theta, planned_type=kind, share=share, local_theta=local_theta)
    more = {key: value for key, value in form.items() if value is not None}.keys() - {"rope_type", "rope_theta"}
    unknown = sorted(more - _KEYS_OF_TYPE[kind])
    if unknown and kind == "yarn":
        return Rope(theta, planned_type=f"yarn with {', '.join(unknown)}", share=share, local_theta=local_theta)
    if unknown:
        raise BadInput(
            f"model {name}: its rotary embedding has {', '.join(unknown)}, which type {kind!r} does not know; give the "
            "rope_type that it belongs to, or remove it."
        )
    if kind == "yarn" and theta <= 1:
        raise BadInput(f"model {name}: config key 'rope_theta' is {theta:g}; rope type yarn needs one above 1.")
    scaling = _scaling(kind, form, max_positions, name)
    if known.parts.layer_rope and isinstance(scaling, YarnScaling) and not scaling.truncates:
        raise BadInput(
            f"model {name}: config key {_TRUNCATE!r} is false, which {family} models ignore; remove the key."
        )
    scale_all = form.get("mscale_all_dim") or 0.0
    score_factor = _temperature(scale_all, scaling.factor) ** 2 if isinstance(scaling, YarnScaling) else 1.0
    return Rope(theta, scaling, share=share, local_theta=local_theta, latent_score_factor=score_factor)


def _temperature(scale: float, factor: float) -> float:
    """YaRN's factor of queries and keys of sequences that are `factor` times as long, which grows with `scale`."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _scaling(kind: str, form: Mapping[str, Any], max_positions: int, name: str) -> RotaryScaling | None:
    """The scaling of a type of rotary embedding that can be run."""
    if kind == "default":
        return None
    if kind == "longrope":
        return _long_scaling(form, max_positions, name)
    factor = number(form, "factor", name)
    if not factor and kind != "llama3":
        raise BadInput(f"model {name}: rope type {kind} has factor=0; it must be above 0.")
    if kind == "linear":
        return LinearScaling(factor=factor)
    original = required_size({_ORIGINAL: max_positions, **form}, _ORIGINAL, name)
    if kind == "yarn":
        return _yarn(form, factor, original, name)
    low, high = (number(form, key, name) for key in _LLAMA3_KEYS[1:])
    if not factor or high <= low:
        raise BadInput(
            f"model {name}: rope type llama3 has factor={factor:g}, low_freq_factor={low:g} and high_freq_factor="
            f"{high:g}; factor must be above 0, and high_freq_factor above low_freq_factor."
        )
    return RopeScaling(factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_positions=original)


def _long_scaling(form: Mapping[str, Any], max_positions: int, name: str) -> LongScaling:
    """The scaling of type longrope, with the defaults of transformers."""
    original = required_size({_ORIGINAL: max_positions, **form}, _ORIGINAL, name)
    if original == 1:
        raise BadInput(f"model {name}: rope type longrope has {_ORIGINAL}=1; give the length before scaling.")
    lists = []
    for key in _LONGROPE_LISTS:
        factors = form.get(key)
        if not isinstance(factors, list) or not all(_is_number(factor) and factor > 0 for factor in factors):
            raise BadInput(
                f"model {name}: rope type longrope has {key}={factors!r:.60}; give a list of numbers above 0."
            )
        lists.append(tuple(map(float, factors)))
    factor = max_positions / original if form.get("factor") is None else number(form, "factor", name)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    given = form.get("attention_factor")
    return LongScaling(
        short_factors=lists[0],
        long_factors=lists[1],
        original_max_positions=original,
        attention_factor=default if given is None else number(form, "attention_factor", name),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _yarn(form: Mapping[str, Any], factor: float, original: int, name: str) -> YarnScaling:
    """The scaling of type yarn, with the defaults of transformers.

    https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_rope_utils.py
    """

    def given(key: str, default: float) -> float:
        return number(form, key, name) if form.get(key) is not None else default

    scale, scale_all = given("mscale", 0.0), given("mscale_all_dim", 0.0)
    default = _temperature(1.0, factor)
    if scale and scale_all:
        default = _temperature(scale, factor) / _temperature(scale_all, factor)
    return YarnScaling(
        factor=factor,
        beta_fast=given("beta_fast", 32.0) or 32.0,
        beta_slow=given("beta_slow", 1.0) or 1.0,
        original_max_positions=original,
        attention_factor=given("attention_factor", default),
        truncates=flag(form, _TRUNCATE, name, default=True),
    )


def _rotary_share(config: Mapping[str, Any], form: Mapping[str, Any], known: Family, name: str) -> float:
    """The rotated share of a head, from the parameters, the config, or the default of the family."""
    rotated = config.get("rotary_dim") if "rotary_dim" in known.defaults else None
    if form.get(_PARTIAL) is None and rotated is not None:
        return required_size(config, "rotary_dim", name) / required_size({**known.defaults, **config}, "head_dim", name)
    given = next((each[_PARTIAL] for each in (form, config, known.defaults) if each.get(_PARTIAL) is not None), 1.0)
    share = number({_PARTIAL: given}, _PARTIAL, name)
    if not 0 < share <= 1:
        raise BadInput(f"model {name}: {_PARTIAL} is {share:g}; it must be above 0 and 1 at most.")
    return share


def _local_theta(config: Mapping[str, Any], known: Family, name: str) -> float:
    """The rotary base of layers with a sliding window if it is one of their own, else 0."""
    if not known.parts.layer_rope:
        return 0.0
    listed = config.get("rope_parameters")
    nested = listed.get(_SLIDING) if isinstance(listed, dict) else None
    if not isinstance(nested, dict):
        nested = {"rope_theta": config.get("rope_local_base_freq")}
    more = {key: value for key, value in nested.items() if value is not None}.keys() - {"rope_type", "rope_theta"}
    if nested.get("rope_type") not in (None, "default") or more:
        raise BadInput(
            f"model {name}: the rotary embedding of {_SLIDING} is {nested}; only rope_type default and a rope_theta "
            "are supported there."
        )
    given = nested.get("rope_theta")
    return number({"rope_theta": known.parts.local_rope_theta if given is None else given}, "rope_theta", name)


def _form(config: Mapping[str, Any], key: str, family: str, name: str) -> dict[str, Any]:
    """The parameters under one of the keys, with base and type filled in. Raises BadInput for invalid ones."""
    form, top_theta = config[key], config.get("rope_theta")
    if not isinstance(form, dict):
        raise BadInput(f"model {name}: config key {key!r} is {form!r}; it must be an object.")
    if FAMILIES[family].parts.layer_rope and key == "rope_parameters":
        form = form.get(_FULL)
        if not isinstance(form, dict):
            raise BadInput(
                f"model {name}: config key {key!r} must have {_FULL!r} and {_SLIDING!r} for {family} models."
            )
    if any(isinstance(value, dict) for value in form.values()):
        raise BadInput(f"model {name}: config key {key!r} has a rotary embedding for each kind of layer; give one.")
    theta = form.get("rope_theta", top_theta)
    if top_theta is not None and theta != top_theta:
        raise BadInput(
            f"model {name}: rope_theta is {top_theta} in the config and {theta} in its {key!r}; keep the one that the "
            "model was trained with."
        )
    if FAMILIES[family].parts.layer_rope and form.get("rope_type") is None and form.get("type") is not None:
        raise BadInput(
            f"model {name}: config key {key!r} has 'type', which {family} models ignore; call it 'rope_type', or "
            "remove it."
        )
    kinds = {str(form[key]) for key in ("rope_type", "type") if form.get(key) is not None} or {"default"}
    if len(kinds) > 1:
        raise BadInput(f"model {name}: config key {key!r} has two types, {' and '.join(sorted(kinds))}; keep one.")
    [kind] = kinds
    if kind not in (*_RUNNABLE, *_PLANNABLE):
        raise BadInput(f"model {name}: rope type {kind!r} is not known; {suggestion(kind, (*_RUNNABLE, *_PLANNABLE))}")
    factor = form.get(_PARTIAL)
    if factor not in (None, 1) and _PARTIAL not in FAMILIES[family].defaults:
        raise BadInput(f"model {name}: config key {key!r} has partial_rotary_factor={factor!r}; only 1 is supported.")
    return _completed(form, config, family)


def _completed(form: Mapping[str, Any], config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The parameters with base, type and the original length of the config filled in."""
    theta = config.get("rope_theta", FAMILIES[family].rope_theta)
    kind = form.get("rope_type") or form.get("type") or "default"
    parameters = {"rope_theta": theta, **form, "rope_type": kind}
    original = config.get(_ORIGINAL, FAMILIES[family].original_positions)
    if original is not None and _ORIGINAL in _KEYS_OF_TYPE.get(kind, ()):
        parameters[_ORIGINAL] = original  # wins over that of the rotary embedding, as in transformers
    return {key: value for key, value in parameters.items() if key not in ("type", *_MEANINGLESS_ROPE_KEYS)}


@dataclass(frozen=True)
class QueryGrowth:
    """The factor 1 + scale x log(1 + floor((position + 1) / floor_scale)) of the queries of a token.

    By it scores grow with the number of tokens that a layer without positions attends to (Nakanishi, arXiv:2501.19399).
    """

    scale: float
    floor_scale: float


def query_growth_from_config(config: Mapping[str, Any], name: str) -> QueryGrowth | None:
    """Return the growth of queries that a completed Hugging Face config describes; None without any.

    Raises BadInput for a floor_scale of 0.
    """
    if "attn_temperature_tuning" not in config or not flag(config, "attn_temperature_tuning", name):
        return None
    floor_scale = number(config, "floor_scale", name)
    if not floor_scale:
        raise BadInput(f"model {name}: config key 'floor_scale' is 0, and positions are divided by it; give 1 or more.")
    return QueryGrowth(number(config, "attn_scale", name), floor_scale)


_MAX_POSITIONS = "max_position_embeddings"


@dataclass(frozen=True, kw_only=True)
class SlidingWindow:
    """A sliding window in `run` layers from layer `first` on, counted from 0, and again after every `every` layers.

    A token in such a layer attends to the last `num_tokens` tokens, including itself (Beltagy et al., Longformer,
    arXiv:2004.05150, section 3.1). If it is `chunked`, windows do not slide: a token attends to those of its own chunk
    of `num_tokens` tokens up to itself (Llama 4).
    """

    num_tokens: int
    first: int = 0
    every: int = 1
    run: int = 1
    chunked: bool = False

    def has_layer(self, layer: int) -> bool:
        """True if layer number `layer` has the window."""
        return self.num_layers(layer, layer + 1) > 0

    def num_layers(self, start: int, end: int) -> int:
        """Number of layers from `start` to `end` - 1 that have the window."""
        return self._num_before(end) - self._num_before(start)

    def _num_before(self, end: int) -> int:
        periods, rest = divmod(max(0, end - self.first), self.every)
        return periods * self.run + min(rest, self.run)

    def attended_tokens(self, tokens: N, context: N) -> N:
        """Mean number of tokens that each of `tokens` new tokens attends to, after a context of `context` tokens."""
        if self.chunked:
            return (self._chunked_pairs(context + tokens) - self._chunked_pairs(context)) / tokens
        unbounded = minimum(maximum(self.num_tokens - context, 0.0), tokens)
        attended = unbounded * (context + (unbounded + 1) / 2)
        return (attended + (tokens - unbounded) * self.num_tokens) / tokens

    def _chunked_pairs(self, tokens: N) -> N:
        """Number of pairs of a token and one that it attends to among the first `tokens`."""
        chunks = floor(tokens / self.num_tokens)
        rest = tokens - chunks * self.num_tokens
        return chunks * (self.num_tokens * (self.num_tokens + 1) / 2) + rest * (rest + 1) / 2


def window_from_config(config: Mapping[str, Any], family: str, name: str) -> SlidingWindow | None:
    """Return the window that a completed Hugging Face config describes.

    None if there is none, or if it is not shorter than the longest sequence and its layers have the same rotary
    embedding as the others. Raises BadInput for an unsupported pattern of layers or an invalid size.
    """
    chunked = FAMILIES[family].parts.other_layers == _CHUNKED
    key = "attention_chunk_size" if chunked else "sliding_window"
    size, is_on = config.get(key), flag(config, "use_sliding_window", name, default=True)
    listed = config.get("layer_types")
    if not is_on and isinstance(listed, list) and _SLIDING in listed:
        raise BadInput(
            f"model {name}: config key 'layer_types' lists {_SLIDING} and 'use_sliding_window' is false; set that to "
            "true, or list full_attention."
        )
    has_own_rope = FAMILIES[family].parts.layer_rope  # then its layers differ even if the window is never reached
    is_unreached = isinstance(size, int) and size >= count_or_zero(config, _MAX_POSITIONS, name)
    if not is_on or ((not size or is_unreached) and not has_own_rope):
        return None
    kinds = attention_types(config, family, name)
    window_layers = [number for number, kind in enumerate(kinds) if kind in (_SLIDING, _CHUNKED)]
    if not window_layers:
        return None
    num_tokens = required_size(config, key, name)
    first, every, run = _period(window_layers, len(kinds))
    window = SlidingWindow(num_tokens=num_tokens, first=first, every=every, run=run, chunked=chunked)
    if window_layers != [number for number in range(len(kinds)) if window.num_layers(number, number + 1)]:
        raise BadInput(
            f"model {name}: sliding windows in layers {', '.join(map(str, window_layers))} are not supported; they "
            "must be in the same layers of every period, from some layer to the last."
        )
    return window


def _period(window_layers: Sequence[int], num_layers: int) -> tuple[int, int, int]:
    """First layer, period and layers of a period that have the window, from the first two runs of such layers."""
    first, listed = window_layers[0], {*window_layers}
    end = next((number for number in range(first, num_layers) if number not in listed), num_layers)
    again = next((number for number in range(end, num_layers) if number in listed), num_layers)
    return (first, 1, 1) if end == num_layers else (first, again - first, end - first)


def attention_types(config: Mapping[str, Any], family: str, name: str) -> Sequence[str]:
    """Return the attention type of each layer, from `layer_types` or else by the rule of the family.

    Raises BadInput for a list that is not one of known types, or an invalid number of layers.
    """
    parts, num_layers = FAMILIES[family].parts, required_size(config, "num_hidden_layers", name)
    if num_layers > MOST_LAYERS:
        raise BadInput(f"model {name}: config key 'num_hidden_layers' is above {MOST_LAYERS}; no model has so many.")
    listed, numbers = config.get("layer_types"), range(num_layers)
    if listed is None:
        return [parts.other_layers if _is_other(config, family, number, name) else _FULL for number in numbers]
    kinds = (_FULL, parts.other_layers)
    if not isinstance(listed, list) or len(listed) != num_layers or not {*map(str, listed)} <= {*kinds}:
        raise BadInput(
            f"model {name}: config key 'layer_types' must list {' or '.join(kinds)} for each of the {num_layers} "
            "layers."
        )
    return listed


def unrotated_layers_from_config(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return the layers whose attention has no rotary embedding, by a completed Hugging Face config.

    Raises BadInput for an invalid number of layers.
    """
    if "no_rope_layer_interval" not in config:
        return ()
    num_layers = required_size(config, "num_hidden_layers", name)
    if num_layers > MOST_LAYERS:
        raise BadInput(f"model {name}: config key 'num_hidden_layers' is above {MOST_LAYERS}; no model has so many.")
    return tuple(number for number in range(num_layers) if not _is_rotated(config, number, name))


def _is_rotated(config: Mapping[str, Any], number: int, name: str) -> bool:
    """Whether a layer has a rotary embedding, by `no_rope_layers`, which lists 1 for those that have it."""
    listed = config.get("no_rope_layers")
    if listed and isinstance(listed, list):
        if len(listed) <= number:
            raise BadInput(f"model {name}: config key 'no_rope_layers' must have a number for each layer.")
        return bool(listed[number])
    return (number + 1) % required_size(config, "no_rope_layer_interval", name) != 0


def _is_other(config: Mapping[str, Any], family: str, number: int, name: str) -> bool:
    """Whether a layer does not attend to all tokens by the rule of its family, where its config lists no types."""
    every = FAMILIES[family].parts.full_every
    last = config.get("max_window_layers")
    if "no_rope_layer_interval" in config:
        return _is_rotated(config, number, name) is (FAMILIES[family].parts.other_layers == _CHUNKED)
    if every:
        interval = required_size(config, every, name) if isinstance(every, str) else every
        return (number + 1) % interval != 0 and not (last is not None and number >= last)
    return last is None or number >= last
