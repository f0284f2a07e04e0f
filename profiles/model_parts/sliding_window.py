"""Sliding-window attention in some or all layers, read from Hugging Face configs."""

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
    """A sliding window in layer `first`, counted from 0, and every `every`-th layer after it.

    A token in such a layer attends to the last `num_tokens` tokens, including itself (Beltagy et al., Longformer,
    arXiv:2004.05150, section 3.1; Hugging Face configs of Mistral, Qwen2, Qwen3 and gpt-oss).
    """

    num_tokens: int
    first: int = 0
    every: int = 1

    def num_layers(self, start: int, end: int) -> int:
        """Number of layers from `start` to `end` - 1 that have the window."""
        return len(range(self.first, end, self.every)) - len(range(self.first, start, self.every))

    def attended_tokens(self, tokens: float, context: float) -> float:
        """Mean number of tokens that each of `tokens` new tokens attends to, after a context of `context` tokens."""
        unbounded = min(max(self.num_tokens - context, 0.0), tokens)
        attended = unbounded * (context + (unbounded + 1) / 2)
        return (attended + (tokens - unbounded) * self.num_tokens) / tokens


def window_from_config(config: Mapping[str, Any], family: str, name: str) -> SlidingWindow | None:
    """Return the window that a completed Hugging Face config describes.

    None if there is none, or if it is not shorter than the longest sequence. Raises BadInput for an unsupported pattern
    of layers or an invalid size.
    """
    size, is_on = config.get("sliding_window"), flag(config, "use_sliding_window", name, default=True)
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
    window_layers = [number for number, kind in enumerate(pattern) if kind == _SLIDING]
    if not window_layers:
        return None
    every = window_layers[1] - window_layers[0] if len(window_layers) > 1 else num_layers
    if window_layers != list(range(window_layers[0], num_layers, every)):
        raise BadInput(
            f"model {name}: sliding windows in layers {', '.join(map(str, window_layers))} are not supported; they "
            "may be in every n-th layer from one on."
        )
    return SlidingWindow(num_tokens=num_tokens, first=window_layers[0], every=every)


def _pattern(config: Mapping[str, Any], family: str, num_layers: int, name: str) -> Sequence[str]:
    """The attention type of each layer, from `layer_types` or else by the rule of the family."""
    listed, numbers = config.get("layer_types"), range(num_layers)
    if listed is None:
        last = config.get("max_window_layers")
        if family in ("GptOss", "Qwen2Moe"):  # every other layer; for Qwen2-MoE only below max_window_layers
            return [_FULL if number % 2 or (last is not None and number >= last) else _SLIDING for number in numbers]
        return [_FULL if last is not None and number < last else _SLIDING for number in numbers]
    if not isinstance(listed, list) or len(listed) != num_layers or not {*map(str, listed)} <= {_FULL, _SLIDING}:
        raise BadInput(
            f"model {name}: config key 'layer_types' must list {_FULL} or {_SLIDING} for each of the {num_layers} "
            "layers."
        )
    return listed
