"""Attention that sees a bounded number of tokens before it, in some layers or in all.

A token of such a layer sees the last `num_tokens` tokens, itself among them (Beltagy et al., Longformer,
arXiv:2004.05150, section 3.1; Hugging Face configs of Mistral, Qwen2, Qwen3 and gpt-oss).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.profiles.errors import BadInput
from meshwright.profiles.model_parts.completed_config import count_or_none, flag, required_size

_FULL, _SLIDING = "full_attention", "sliding_attention"
_LONGEST = "max_position_embeddings"


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
    """The window that the keys of a completed Hugging Face config describe; None where there is none, or none that is
    shorter than the longest sequence. Raises BadInput for a pattern of layers or a size that is not known here."""
    size, is_on = config.get("sliding_window"), flag(config, "use_sliding_window", name, otherwise=True)
    listed = config.get("layer_types")
    if not is_on and isinstance(listed, list) and _SLIDING in listed:
        raise BadInput(
            f"model {name}: config key 'layer_types' lists {_SLIDING} and 'use_sliding_window' is false; set that to "
            "true, or list full_attention."
        )
    if not size or not is_on or (isinstance(size, int) and size >= count_or_none(config, _LONGEST, name)):
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
    listed, numbers = config.get("layer_types"), range(num_layers)
    if listed is None:
        last = config.get("max_window_layers")
        if family in ("GptOss", "Qwen2Moe"):  # every other layer, of Qwen2-MoE up to that number
            return [_FULL if number % 2 or (last is not None and number >= last) else _SLIDING for number in numbers]
        return [_FULL if last is not None and number < last else _SLIDING for number in numbers]
    if not isinstance(listed, list) or len(listed) != num_layers or not {*map(str, listed)} <= {_FULL, _SLIDING}:
        raise BadInput(
            f"model {name}: config key 'layer_types' must list {_FULL} or {_SLIDING} for each of the {num_layers} "
            "layers."
        )
    return listed
