"""A Hugging Face config with the values that stand for keys left out, refused where it contradicts itself.

What is not refused means here what transformers computes of the same file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.profiles.errors import BadInput, require_none
from meshwright.profiles.model_parts.family_keys import FAMILIES, Family

_LARGEST, _LARGEST_NUMBER = 2**40, 1e30
"""Sizes of a model, and other numbers of a config, are below."""

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""Every config that transformers has ever written gives them: one without is cut short, and not of the default size."""

_OWN_EXPERTS = "moe_intermediate_size"
"""A family with this key needs no `intermediate_size` unless it has dense layers."""

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
"""Keys that change a model where a family has them, with what the models of all other families compute."""

_PRESENT: Mapping[str, frozenset[str]] = {
    "attention_bias": frozenset({"Qwen2"}),
    "qkv_bias": frozenset({"Qwen2"}),
    "use_qk_norm": frozenset({"Qwen3", "Qwen3Moe"}),
}
"""Of these the ones that a family has always, without a key."""

_KINDS = {bool: "true or false", int: "a positive integer", float: "a number", str: "a text"}


def completed(config: Mapping[str, Any], family: str, name: str) -> dict[str, Any]:
    """The keys that shape a model of the family, those left out with their values in transformers.

    None stays where the family derives a value from others. Raises BadInput for a config that contradicts itself, for
    one without a size that every config has, and for null where the family takes none.
    """
    known, given = FAMILIES[family], dict(config)
    require_none(_contradictions(config, family, known), f"model {name}")
    for alias, key in known.aliases.items():
        if given.get(key) is None and given.get(alias) is not None:
            given[key] = given[alias]
    found = {}
    for key, default in known.defaults.items():
        value = given.get(key, default)
        is_needed = key in _REQUIRED and not (key == "intermediate_size" and _OWN_EXPERTS in known.defaults)
        if (is_needed and key not in given) or (key in given and value is None and not known.may_be_null(key)):
            kind = _KINDS.get(type(default), "a number")
            raise BadInput(f"model {name}: config key {key!r} is {given.get(key)!r}; it must be {kind}.")
        found[key] = value
    return found


def _contradictions(config: Mapping[str, Any], family: str, known: Family) -> Iterator[str]:
    """One sentence for each place where keys say two things, or one that the family does not compute."""
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
    old, activation = config.get("hidden_activation"), activation_of(config, family)
    if old is not None and old != activation:
        yield (
            f"config key 'hidden_activation' is {old!r}, and {family} models compute 'hidden_act', which is "
            f"{activation!r}; give both the same value."
        )
    layers = config.get("layer_types")
    if "layer_types" not in known.defaults and isinstance(layers, list):
        all_slide = "sliding_window" in known.defaults and config.get("use_sliding_window", True)
        if {*map(str, layers)} != {"sliding_attention" if all_slide else "full_attention"}:
            yield (
                f"config key 'layer_types' lists {', '.join(sorted({*map(str, layers)}))}, and {family} models have "
                "the same attention in all layers; remove the key."
            )


def activation_of(config: Mapping[str, Any], family: str) -> Any:
    """By the name that transformers computes it by: early configs of Gemma say "gelu" and mean the tanh form."""
    found = config.get("hidden_act", FAMILIES[family].defaults["hidden_act"])
    return "gelu_pytorch_tanh" if family == "Gemma" and found == "gelu" else found


def _both(values: Mapping[str, Any]) -> str:
    return " and ".join(f"{key}={value!r}" for key, value in values.items())


def required_size(config: Mapping[str, Any], key: str, name: str) -> int:
    """The value of a key that must be a positive integer; raises BadInput when it is not."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadInput(f"model {name}: config key {key!r} is {value!r}; it must be a positive integer.")
    if value > _LARGEST:
        raise BadInput(f"model {name}: config key {key!r} is above {_LARGEST}; no model is so large.")
    return value


def size_or(config: Mapping[str, Any], key: str, otherwise: int, name: str) -> int:
    """A size that may be null, and then is `otherwise`; raises BadInput for one that is none."""
    return otherwise if config.get(key) is None else required_size(config, key, name)


def count_or_none(config: Mapping[str, Any], key: str, name: str) -> int:
    """A size that may be 0, left out or null; raises BadInput for one that is none."""
    return 0 if config.get(key) in (None, 0) and config.get(key) is not False else required_size(config, key, name)


def number(config: Mapping[str, Any], key: str, name: str) -> float:
    """The value of a key that must be a number from 0 on; raises BadInput when it is not."""
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _LARGEST_NUMBER:
        raise BadInput(f"model {name}: config key {key!r} is {value!r}; it must be a number.")
    return float(value)


def flag(config: Mapping[str, Any], key: str, name: str, *, otherwise: bool = False) -> bool:
    """The value of a key that must be true or false, `otherwise` for one that the family has not; raises BadInput when
    it is neither."""
    value = config.get(key, otherwise)
    if not isinstance(value, bool):
        raise BadInput(f"model {name}: config key {key!r} is {value!r}; it must be true or false.")
    return value
