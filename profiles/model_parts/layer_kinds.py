"""The kinds of layers of a model: attention or a layer with a state, and a plain MLP or experts; read from a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from meshwright.profiles.errors import BadInput
from meshwright.profiles.experts import Experts, expert_layers_from_config
from meshwright.profiles.model_parts.family_keys import FAMILIES
from meshwright.profiles.model_parts.hf_config import MOST_LAYERS, attention_types, required_size

TokenMixer: TypeAlias = Literal["attention", "linear", "none"]
FeedForward: TypeAlias = Literal["dense", "experts", "none"]


class LayerKind(NamedTuple):
    """The blocks of a layer; one of them may be missing."""

    mixer: TokenMixer = "attention"
    mlp: FeedForward = "dense"

    @property
    def num_blocks(self) -> int:
        return (self.mixer != "none") + (self.mlp != "none")


_BLOCKS: Mapping[str, LayerKind] = {
    "linear_attention": LayerKind("linear", "none"),
    "mamba": LayerKind("linear", "none"),
    "full_attention": LayerKind("attention", "none"),
    "attention": LayerKind("attention", "none"),
    "mlp": LayerKind("none", "dense"),
    "moe": LayerKind("none", "experts"),
}
"""The blocks of Nemotron-H, one a layer."""

_LETTERS: Mapping[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""The blocks of Nemotron-H in `hybrid_override_pattern`."""


def layer_kinds_from_config(
    config: Mapping[str, Any], family: str, experts: Experts | None, name: str
) -> tuple[LayerKind, ...]:
    """Return the kind of each layer; empty if all have attention, and experts if they come after the dense layers.

    Raises BadInput for a list of layers that is not one of known kinds.
    """
    parts = FAMILIES[family].parts
    if "layers_block_type" in config:
        return _blocks(config, name)
    expert_layers = expert_layers_from_config(config, experts, name) if experts else frozenset[int]()
    is_plain = experts is None or expert_layers == {*range(experts.num_dense_layers, config["num_hidden_layers"])}
    if is_plain and parts.mixers == ("attention",):
        return ()
    types = attention_types(config, family, name)
    return tuple(
        LayerKind("linear" if kind == "linear_attention" else "attention", "experts" if n in expert_layers else "dense")
        for n, kind in enumerate(types)
    )


def _blocks(config: Mapping[str, Any], name: str) -> tuple[LayerKind, ...]:
    """The layers that `layers_block_type` lists or `hybrid_override_pattern` spells."""
    listed, pattern = config.get("layers_block_type"), config.get("hybrid_override_pattern")
    if listed is None and isinstance(pattern, str):
        listed = [_LETTERS.get(letter, letter) for letter in pattern]
    if not isinstance(listed, list) or not listed or not {*map(str, listed)} <= _BLOCKS.keys():
        key = "layers_block_type" if pattern is None else "hybrid_override_pattern"
        raise BadInput(
            f"model {name}: config key {key!r} is {config.get(key)!r}; it must name the block of each layer: "
            f"{', '.join(_BLOCKS)}."
        )
    num_layers = config.get("num_hidden_layers")
    if num_layers is not None and required_size(config, "num_hidden_layers", name) != len(listed):
        raise BadInput(
            f"model {name}: num_hidden_layers is {num_layers}, and the blocks of {len(listed)} layers are listed; "
            "correct the one that does not match the weights."
        )
    if len(listed) > MOST_LAYERS:
        raise BadInput(f"model {name}: more than {MOST_LAYERS} layers are listed; no model has so many.")
    return tuple(_BLOCKS[block] for block in listed)
