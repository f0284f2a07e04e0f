import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.profiles.errors import BadInput
from meshwright.profiles.model_parts.hf_config import RopeScaling
from meshwright.profiles.model_shape import ModelSpec, model_from_config, read_model

LLAMA_2_7B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
LLAMA_3_8B = LLAMA_2_7B | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
}
QWEN_2_5_1_5B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "num_hidden_layers": 28,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "rope_theta": 1000000.0,
}


def spec(config: dict[str, Any], **changes: Any) -> ModelSpec:
    return model_from_config(config | changes, name="m")


@pytest.mark.parametrize(
    ("config", "num_params"),
    [
        (LLAMA_2_7B, 6_738_415_616),  # as the Hugging Face index says, 13,476,831,232 bytes in bf16
        (LLAMA_3_8B, 8_030_261_248),
        (QWEN_2_5_1_5B, 1_543_714_304),
    ],
)
def test_published_models_have_their_published_number_of_parameters(config: dict[str, Any], num_params: int) -> None:
    assert spec(config).num_params == num_params


def test_a_scalar_head_replaces_the_vocabulary() -> None:
    reward = spec(LLAMA_2_7B, architectures=["LlamaForSequenceClassification"])
    assert reward.scalar_head
    assert reward.num_params == spec(LLAMA_2_7B).num_params - 32000 * 4096 + 4096
    assert model_from_config(LLAMA_2_7B, name="critic", scalar_head=True).scalar_head


@pytest.mark.parametrize("config", [LLAMA_2_7B, LLAMA_3_8B, QWEN_2_5_1_5B])
@pytest.mark.parametrize("scalar_head", [False, True])
def test_shards_hold_the_model_once_and_what_they_repeat(config: dict[str, Any], scalar_head: bool) -> None:
    whole = model_from_config(config, name="m", scalar_head=scalar_head)
    norms = whole.hidden_size * (2 * whole.num_layers + 1)
    repeated = norms + (whole.hidden_size if scalar_head else 0)
    assert whole.shard(1).num_params == whole.num_params
    assert 2 * whole.shard(2).num_params == whole.num_params + repeated


def test_a_shard_is_not_padded_again() -> None:
    assert spec(LLAMA_2_7B).shard(32).padded_vocab_size == 1000
    assert spec(LLAMA_2_7B, vocab_size=32001).padded_vocab_size == 32064


def test_a_shard_that_does_not_divide_is_refused() -> None:
    with pytest.raises(BadInput, match="tp=16 does not divide num_kv_heads=8"):
        spec(LLAMA_3_8B).shard(16)


def test_families_differ_where_they_differ() -> None:
    sizes = LLAMA_2_7B | {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh", "num_key_value_heads": 32}
    gemma = spec(sizes, architectures=["GemmaForCausalLM"])
    assert (gemma.norm_offset, gemma.embedding_scale, gemma.tied_embeddings) == (1.0, 64.0, True)
    assert (gemma.activation, gemma.attention_size) == ("gelu_tanh", 8192)
    assert spec(LLAMA_2_7B, architectures=["Qwen3ForCausalLM"]).qk_norm
    assert spec(QWEN_2_5_1_5B).qkv_bias
    assert not spec(QWEN_2_5_1_5B).output_bias


def test_rotary_settings_are_read_from_old_and_new_keys() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    old = spec(LLAMA_3_8B, rope_scaling=scaling)
    new = spec(LLAMA_2_7B, rope_parameters=scaling | {"rope_theta": 500000.0})
    assert old.rope_scaling == new.rope_scaling == expected
    assert old.rope_theta == new.rope_theta == 500000.0


def test_a_model_is_read_from_a_directory_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_7B))
    assert read_model(tmp_path) == read_model(tmp_path / "config.json")
    assert read_model(tmp_path).name == tmp_path.name


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["LLamaForCausalLM"]}, "did you mean 'LlamaForCausalLM'?"),
        ({"architectures": None}, "architecture None is not known"),
        (
            {"architectures": ["Olmo1ForCausalLM"]},
            "architecture 'Olmo1ForCausalLM' is not known; known: Llama, Mistral",
        ),
        ({"architectures": ["Gemma4ForCausalLM"]}, "is not known; known: Llama, Mistral"),
        ({"text_config": {"model_type": "gemma3_text"}}, "reads images and text; to plan its text model, write"),
        ({"architectures": ["LlamaModel"]}, "each with ForCausalLM or ForSequenceClassification"),
        ({"architectures": None, "model_type": "gpt2"}, "model_type 'gpt2' is not known; known: deepseek_v2"),
        ({"model_type": "granite"}, "model_type 'granite' is not that of architecture 'LlamaForCausalLM'"),
        ({"hidden_size": "4096"}, "'hidden_size' is '4096'; it must be a positive integer"),
        ({"hidden_act": "relu"}, "activation 'relu' is not known"),
        ({"num_attention_heads": 33}, "33 attention heads do not divide hidden_size=4096; give head_dim"),
        ({"num_key_value_heads": 5}, "num_kv_heads=5 does not divide num_heads=32"),
        ({"rope_scaling": {"rope_type": "yarm"}}, "rope type 'yarm' is not known"),
    ],
)
def test_an_unknown_shape_is_refused_in_one_sentence(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput) as error:
        spec(LLAMA_2_7B, **changes)
    assert says in str(error.value)


def test_a_missing_or_malformed_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="give a Hugging Face directory"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(BadInput, match="holds list; a JSON object is needed"):
        read_model(tmp_path)


def test_a_model_type_is_enough_to_know_a_model() -> None:
    typed = {**{key: value for key, value in LLAMA_2_7B.items() if key != "architectures"}, "model_type": "llama"}
    assert model_from_config(typed, name="m") == spec(LLAMA_2_7B)


def test_a_model_is_called_as_its_directory_however_the_path_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_7B))
    monkeypatch.chdir(tmp_path)
    assert read_model(Path()).name == read_model(Path("config.json")).name == tmp_path.name


@pytest.mark.parametrize(
    ("text_config", "says"),
    [({"model_type": "qwen3"}, "with model_type 'qwen3'."), ({}, "with the model_type of its language model.")],
)
def test_a_model_of_images_and_text_is_told_how_its_text_model_is_planned(
    text_config: dict[str, str], says: str
) -> None:
    with pytest.raises(BadInput) as refusal:
        model_from_config({"model_type": "qwen3_vl", "text_config": text_config}, name="vision")
    assert str(refusal.value).endswith(says)
