"""Hugging Face configs completed with the defaults of their family, and refused if they contradict themselves.

An accepted config describes the same model that transformers builds from the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.profiles.errors import BadInput, require_none
from meshwright.profiles.model_parts.family_keys import FAMILIES, Family

_LARGEST, _LARGEST_NUMBER = 2**40, 1e30
"""Upper bounds on the sizes of a model and on other numbers of a config."""

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""Keys in every config that transformers writes: without one the file is incomplete, and a default would be wrong."""

_OWN_EXPERTS = "moe_intermediate_size"
"""A family with this key needs `intermediate_size` only for dense layers."""

_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")

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
}
"""Keys that change models of some families, with the value that all other families compute with."""

_PRESENT: Mapping[str, frozenset[str]] = {
    "attention_bias": frozenset({"Qwen2"}),
    "qkv_bias": frozenset({"Qwen2"}),
    "use_qk_norm": frozenset({"Qwen3", "Qwen3Moe"}),
}
"""Families that always compute as if the key were true, without having it."""

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
        is_needed = key in _REQUIRED and not (key == "intermediate_size" and _OWN_EXPERTS in known.defaults)
        if (is_needed and key not in with_aliases) or (
            key in with_aliases and value is None and not known.may_be_null(key)
        ):
            kind = _KINDS.get(type(default), "a number")
            raise BadInput(f"model {name}: config key {key!r} is {with_aliases.get(key)!r}; it must be {kind}.")
        values[key] = value
    return values


def _contradictions(config: Mapping[str, Any], family: str, known: Family) -> Iterator[str]:
    """One sentence for each contradiction between keys, and for each key that the family ignores."""
    counts = {key: config[key] for key in _COUNTS if config.get(key) is not None}
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
    alternative, activation = config.get("hidden_activation"), activation_of(config, family)
    if alternative is not None and alternative != activation:
        yield (
            f"config key 'hidden_activation' is {alternative!r}, and {family} models compute 'hidden_act', which is "
            f"{activation!r}; give both the same value."
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
    activation = config.get("hidden_act", FAMILIES[family].defaults["hidden_act"])
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
    """Return a size, or `otherwise` if it is null. Raises BadInput if it is not a positive integer."""
    return default if config.get(key) is None else required_size(config, key, name)


def count_or_none(config: Mapping[str, Any], key: str, name: str) -> int:
    """Return a count, or 0 if it is missing or null. Raises BadInput if it is not an integer of 0 or more."""
    return 0 if config.get(key) in (None, 0) and config.get(key) is not False else required_size(config, key, name)


def number(config: Mapping[str, Any], key: str, name: str) -> float:
    """Return the value of a key that must be a number of 0 or more. Raises BadInput if it is not."""
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _LARGEST_NUMBER:
        raise BadInput(f"model {name}: config key {key!r} is {value!r}; it must be a number.")
    return float(value)


def flag(config: Mapping[str, Any], key: str, name: str, *, default: bool = False) -> bool:
    """Return the value of a boolean key, `otherwise` if it is absent. Raises BadInput if it is not a boolean."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise BadInput(f"model {name}: config key {key!r} is {value!r}; it must be true or false.")
    return value
