"""Sliding windows are read from configs as transformers builds them, and their tokens are counted one by one."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from meshwright.profiles.errors import BadInput
from meshwright.profiles.model_parts.hf_config import SlidingWindow, complete_config, window_from_config

BASE = {"num_hidden_layers": 6, "max_position_embeddings": 4096, "sliding_window": 256}
SIZES = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
TYPES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "qwen2_moe": "Qwen2Moe", "gpt_oss": "GptOss"}


def window(family: str, **changes: Any) -> SlidingWindow | None:
    given = SIZES | BASE | changes | ({"head_dim": 8} if family == "Ministral" else {})
    return window_from_config(complete_config(given, family, "m"), family, "m")


@pytest.mark.parametrize(
    "window",
    [
        SlidingWindow(num_tokens=7),
        SlidingWindow(num_tokens=7, first=1, every=3),
        SlidingWindow(num_tokens=7, first=1, every=4, run=3),
    ],
)
def test_layers_with_the_window_are_counted_in_any_run_of_layers(window: SlidingWindow) -> None:
    with_it = [layer >= window.first and (layer - window.first) % window.every < window.run for layer in range(12)]
    for start in range(13):
        for end in range(start, 13):
            assert window.num_layers(start, end) == sum(with_it[start:end])


@pytest.mark.parametrize(("tokens", "context"), [(1, 0), (5, 0), (40, 0), (1, 6), (1, 50), (9, 3), (9, 8), (9, 30)])
def test_a_token_sees_itself_and_those_before_it_up_to_the_window(tokens: int, context: int) -> None:
    seen = [min(context + position + 1, 8) for position in range(tokens)]
    assert SlidingWindow(num_tokens=8).attended_tokens(tokens, context) == pytest.approx(sum(seen) / tokens)


@pytest.mark.parametrize(("tokens", "context"), [(1, 0), (5, 0), (8, 0), (40, 0), (1, 7), (1, 50), (9, 3), (9, 30)])
def test_in_chunks_a_token_sees_those_of_its_own_chunk(tokens: int, context: int) -> None:
    seen = [(context + position) % 8 + 1 for position in range(tokens)]
    window = SlidingWindow(num_tokens=8, chunked=True)
    assert window.attended_tokens(tokens, context) == pytest.approx(sum(seen) / tokens)


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("Mistral", {}, SlidingWindow(num_tokens=256)),
        ("Mistral", {"sliding_window": None}, None),
        ("Mistral", {"sliding_window": 4096}, None),
        ("Qwen2", {"max_window_layers": 4}, None),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 4}, SlidingWindow(num_tokens=256, first=4)),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 6}, None),
        ("Qwen2", {"use_sliding_window": True}, None),  # from layer 28 on
        ("GptOss", {}, SlidingWindow(num_tokens=256, every=2)),
        ("Gemma3", {"sliding_window_pattern": 3}, SlidingWindow(num_tokens=256, every=3, run=2)),
        ("Gemma3", {}, SlidingWindow(num_tokens=256, every=6, run=5)),
        ("Olmo3", {}, SlidingWindow(num_tokens=256, every=4, run=3)),
        ("Ministral", {}, SlidingWindow(num_tokens=256)),
        ("SmolLM3", {"use_sliding_window": True}, SlidingWindow(num_tokens=256, first=3, every=3)),
        ("Llama4", {"attention_chunk_size": 64}, SlidingWindow(num_tokens=64, every=4, run=3, chunked=True)),
    ],
)
def test_a_family_has_it_in_the_layers_that_its_configs_mean(
    family: str, changes: dict[str, Any], expected: SlidingWindow | None
) -> None:
    assert window(family, **changes) == expected


@pytest.mark.parametrize("model_type", TYPES)
def test_without_a_list_of_layers_it_is_in_those_that_transformers_lists(model_type: str) -> None:
    given = {"use_sliding_window": True, "max_window_layers": 6 if model_type == "qwen2_moe" else 4} | BASE
    if model_type == "gpt_oss":
        given = BASE
    listed = AutoConfig.for_model(model_type, **given).layer_types
    found = window(TYPES[model_type], **given)
    assert found is not None
    with_it = [kind == "sliding_attention" for kind in listed]
    assert [found.num_layers(layer, layer + 1) for layer in range(6)] == with_it
    again = window(TYPES[model_type], **given, layer_types=listed)
    assert again is not None
    assert [again.num_layers(layer, layer + 1) for layer in range(6)] == with_it


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"layer_types": ["sliding_attention", "full_attention", "full_attention"] + ["sliding_attention"] * 3},
            "in layers 0, 3, 4, 5 are not supported",
        ),
        ({"layer_types": ["chunked_attention"] * 6}, "must list full_attention or sliding_attention for each of the 6"),
        ({"layer_types": ["sliding_attention"]}, "for each of the 6 layers"),
        ({"sliding_window": "wide"}, "'sliding_window' is 'wide'; it must be a positive integer"),
    ],
)
def test_what_is_not_known_of_windows_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput) as error:
        window("GptOss", **changes)
    assert says in str(error.value)


def test_layers_that_slide_where_nothing_does_are_refused() -> None:
    with pytest.raises(BadInput, match=r"lists sliding_attention and 'use_sliding_window' is false"):
        window("Qwen2", layer_types=["sliding_attention"] * 6)
