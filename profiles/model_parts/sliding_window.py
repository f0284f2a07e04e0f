"""Attention that sees a bounded number of tokens before it, in some layers or in all.

A token of such a layer sees the last `num_tokens` tokens, itself among them (Beltagy et al., Longformer,
arXiv:2004.05150, section 3.1; Hugging Face configs of Mistral, Qwen2, Qwen3 and gpt-oss).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.profiles.errors import BadInput
from meshwright.profiles.experts import required_size, size_or

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ALWAYS = ("Mistral", "Mixtral", "GptOss")
"""Families whose configs have no switch for it."""

_IN_ALL_LAYERS = ("Mistral", "Mixtral", "Qwen3Moe")
"""Families that have it in all layers where they have it, unless a config lists the layers."""


@dataclass(frozen=True, kw_only=True)
class SlidingWindow:
    """Of the layers, counted from 0, `first` and every `every`-th behind it have the window."""

    num_tokens: int
    first: int = 0
    every: int = 1

    def num_layers(self, start: int, end: int) -> int:
        """Those of the layers start, ..., end - 1 that have the window."""
        return len(range(self.first, end, self.every)) - len(range(self.first, start, self.every))

    def seen(self, tokens: float, context: float) -> float:
        """Tokens that each of so many new ones sees on average, behind so many that are there."""
        growing = min(max(self.num_tokens - context, 0.0), tokens)
        sees_all = growing * (context + (growing + 1) / 2)
        return (sees_all + (tokens - growing) * self.num_tokens) / tokens


def window_from_config(config: Mapping[str, Any], family: str, name: str) -> SlidingWindow | None:
    """The window that the keys of a Hugging Face config describe; None where there is none, or none that is shorter
    than the longest sequence. Raises BadInput for a pattern of layers or a size that is not known here."""
    size, is_on = config.get("sliding_window"), config.get("use_sliding_window", family in _ALWAYS)
    longest = size_or(config, "max_position_embeddings", 0, name)
    if not size or not is_on or (isinstance(size, int) and size >= longest):
        return None
    num_tokens = required_size(config, "sliding_window", name)
    num_layers = required_size(config, "num_hidden_layers", name)
    pattern = _pattern(config, family, num_layers, name)
    with_it = [number for number, kind in enumerate(pattern) if kind == _SLIDING]
    if not with_it:
        return None
    every = with_it[1] - with_it[0] if len(with_it) > 1 else num_layers
    if with_it != list(range(with_it[0], num_layers, every)):
        raise BadInput(
            f"model {name}: sliding windows in layers {', '.join(map(str, with_it))} are not known; they may be in "
            "every n-th layer from one on."
        )
    return SlidingWindow(num_tokens=num_tokens, first=with_it[0], every=every)


def _pattern(config: Mapping[str, Any], family: str, num_layers: int, name: str) -> Sequence[str]:
    """What the attention of each layer is, as listed or as a family has it without a list."""
    listed = config.get("layer_types")
    if listed is None:
        if family == "GptOss":
            return [_FULL if number % 2 else _SLIDING for number in range(num_layers)]
        first = 0 if family in _IN_ALL_LAYERS else config.get("max_window_layers", num_layers)
        return [_SLIDING if number >= first else _FULL for number in range(num_layers)]
    if not isinstance(listed, list) or len(listed) != num_layers or not {*map(str, listed)} <= {_FULL, _SLIDING}:
        raise BadInput(
            f"model {name}: config key 'layer_types' must list {_FULL} or {_SLIDING} for each of the {num_layers} "
            "layers."
        )
    return listed
