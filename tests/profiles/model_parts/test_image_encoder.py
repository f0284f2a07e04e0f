"""Models of images and text have the parameters of the module that transformers builds, encoder and text model."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from meshwright.profiles.errors import BadInput
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec, model_from_config, run_violations
from meshwright.profiles.workload import Images, Workload

Config = dict[str, Any]

_WINDOWED: Config = {
    "depth": 32,
    "hidden_act": "silu",
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_chans": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 2,
    "temporal_patch_size": 2,
}
_DEEPSTACK: Config = {
    "deepstack_visual_indexes": [8, 16, 24],
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_SMALL: Config = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}


def windowed(vision: Config, **text: Any) -> Config:
    """A config of Qwen2.5-VL, whose keys of the text model are beside those of the encoder."""
    return {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "hidden_act": "silu",
        "max_position_embeddings": 128000,
        "max_window_layers": 70,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": _WINDOWED | {"out_hidden_size": text["hidden_size"]} | vision,
        **text,
    }


def deepstacked(vision: Config, *, is_tied: bool = False, kind: str = "qwen3_vl", **text: Any) -> Config:
    """A config of Qwen3-VL."""
    common = {
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "vocab_size": 151936,
        "attention_bias": False,
        "model_type": f"{kind}_text",
    }
    return {
        "model_type": kind,
        "text_config": common | text,
        "tie_word_embeddings": is_tied,
        "vision_config": _DEEPSTACK | {"model_type": kind, "out_hidden_size": text["hidden_size"]} | vision,
    }


def sizes(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> Config:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


PUBLISHED: dict[str, Config] = {
    "qwen2.5-vl-3b": windowed({}, **sizes(2048, 11008, 36, 16, 2), vocab_size=151936, tie_word_embeddings=True),
    "qwen2.5-vl-7b": windowed({}, **sizes(3584, 18944, 28, 28, 4), vocab_size=152064, tie_word_embeddings=False),
    "qwen2.5-vl-72b": windowed(
        {"intermediate_size": 3456}, **sizes(8192, 29568, 80, 64, 8), vocab_size=152064, tie_word_embeddings=False
    ),
    "qwen3-vl-4b": deepstacked(_SMALL, is_tied=True, **sizes(2560, 9728, 36, 32, 8)),
    "qwen3-vl-8b": deepstacked({}, **sizes(4096, 12288, 36, 32, 8)),
    "qwen3-vl-32b": deepstacked({}, **sizes(5120, 25600, 64, 64, 8)),
    "qwen3-vl-30b-a3b": deepstacked(
        {},
        kind="qwen3_vl_moe",
        **sizes(2048, 6144, 48, 32, 4),
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
}


def spec(config: Config) -> ModelSpec:
    return model_from_config(config, name="m")


def num_params(config: Config) -> tuple[int, int]:
    """Parameters of the encoder and of the text model of the module that transformers builds, without memory."""
    given = deepcopy({key: value for key, value in config.items() if key not in ("architectures", "model_type")})
    with torch.device("meta"):
        built = AutoModelForImageTextToText.from_config(AutoConfig.for_model(config["model_type"], **given))
    counts = {name: parameter.numel() for name, parameter in built.named_parameters()}
    of_encoder = sum(count for name, count in counts.items() if ".visual." in name)
    return of_encoder, sum(counts.values()) - of_encoder


def planned_params(config: Config) -> tuple[int, int]:
    model = spec(config)
    assert model.image_encoder is not None
    padding = (model.padded_vocab_size - model.vocab_size) * model.hidden_size * (1 if model.tied_embeddings else 2)
    return model.image_encoder.num_params, model.num_params - padding


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_encoder_and_text_model_are_those_of_the_module(name: str) -> None:
    assert planned_params(PUBLISHED[name]) == num_params(PUBLISHED[name])


@pytest.mark.parametrize(
    "changes",
    [
        {"fullatt_block_indexes": [3]},
        {"window_size": 56, "patch_size": 7},
        {"spatial_merge_size": 1},
        {"temporal_patch_size": 1, "in_channels": 1},
    ],
    ids=str,
)
def test_other_sizes_of_an_encoder_are_those_of_the_module(changes: Config) -> None:
    config = windowed(changes, **sizes(256, 512, 2, 4, 2), vocab_size=512, tie_word_embeddings=False)
    assert planned_params(config) == num_params(config)


@pytest.mark.parametrize("changes", [{"deepstack_visual_indexes": []}, {"num_position_embeddings": 100}], ids=str)
def test_an_encoder_without_deepstack_or_with_other_positions_is_that_of_the_module(changes: Config) -> None:
    config = deepstacked(changes, **sizes(256, 512, 2, 4, 2))
    assert planned_params(config) == num_params(config)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_missing_keys_have_the_defaults_of_transformers(kind: str) -> None:
    """Those that every published config has are needed, and the others may be missing."""
    text = {**sizes(512, 512, 2, 64, 8), "vocab_size": 512}
    vision = {"depth": 32, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 512}
    del text["num_key_value_heads"]
    config = {"model_type": kind, "text_config": text, "vision_config": vision}
    assert planned_params(config) == num_params(config)
    built = AutoConfig.for_model(kind, **deepcopy({"text_config": text, "vision_config": vision})).text_config
    model = spec(config)
    assert model.norm_epsilon == built.rms_norm_eps
    assert model.max_positions == built.max_position_embeddings
    assert model.rope_theta == built.rope_parameters["rope_theta"]
    assert model.num_kv_heads == built.num_key_value_heads


def test_windows_hold_the_patches_of_whole_tokens_and_named_blocks_all_of_an_image() -> None:
    encoder = spec(PUBLISHED["qwen2.5-vl-7b"]).image_encoder
    assert encoder is not None
    assert (encoder.num_blocks, encoder.num_full_blocks, encoder.window_patches) == (32, 4, 64)
    assert encoder.patches_per_token == 4


def test_a_model_of_images_is_planned_and_not_run() -> None:
    [said] = run_violations(spec(PUBLISHED["qwen3-vl-8b"]))
    assert said == (
        "model m reads images: it can be planned and simulated, and running models of images is future work; give a "
        "model of text."
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"out_hidden_size": 1024}, "out_hidden_size=1024 is not the hidden_size=4096 of its text model"),
        ({"num_heads": 7}, "num_heads=7 does not divide hidden_size=1152"),
        ({"deepstack_visual_indexes": [27]}, "must list blocks between 0 and 26"),
        ({"deepstack_visual_indexes": [1, 1]}, "lists a block twice"),
        ({"depth": None}, "config key 'depth' is None; it must be a positive integer"),
        ({"patch_size": [16, 16]}, "config key 'patch_size' is [16, 16]; it must be a positive integer"),
    ],
)
def test_an_encoder_that_cannot_be_planned_is_refused_in_one_sentence(changes: Config, says: str) -> None:
    with pytest.raises(BadInput) as refusal:
        spec(deepstacked(changes, **sizes(4096, 12288, 36, 32, 8)))
    assert says in str(refusal.value)


def test_a_config_without_that_of_its_encoder_is_refused() -> None:
    config = {key: value for key, value in PUBLISHED["qwen2.5-vl-7b"].items() if key != "vision_config"}
    with pytest.raises(BadInput, match="has no 'vision_config'; give the complete config"):
        spec(config)


@pytest.mark.parametrize(("number", "tokens"), [(2, 60), (1, 101)])
def test_images_that_prompts_cannot_hold_are_refused(number: int, tokens: int) -> None:
    images = Images(number=LengthSpec(max=number, fixed=number), tokens=LengthSpec(max=tokens, fixed=tokens))
    with pytest.raises(ValueError, match="give longer prompts, or fewer or smaller images"):
        Workload(
            batch_size=8, prompt=LengthSpec(max=100, fixed=100), response=LengthSpec(max=8, fixed=8), images=images
        )
