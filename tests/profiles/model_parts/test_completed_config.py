"""Keys left out get their family's values, and what contradicts itself is told."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.profiles.errors import BadInput
from meshwright.profiles.model_parts.family_keys import FAMILIES
from meshwright.profiles.model_parts.hf_config import complete_config

BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_left_out_have_the_values_of_the_family(family: str) -> None:
    known = FAMILIES[family].defaults
    given = {key: value for key, value in BASE.items() if key in known}
    given |= dict.fromkeys(FAMILIES[family].required, 16)
    assert complete_config(BASE | given, family, "m") == {**known, **given}


def test_keys_of_other_families_shape_nothing() -> None:
    assert "shared_expert_intermediate_size" not in complete_config(
        {**BASE, "shared_expert_intermediate_size": 32}, "Qwen3Moe", "m"
    )


def test_another_name_of_a_key_is_read() -> None:
    assert complete_config({**BASE, "num_local_experts": 5}, "Qwen3Moe", "m")["num_experts"] == 5


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("Llama", {"hidden_size": None}, "'hidden_size' is None; it must be a positive integer"),
        ("Mistral", {"num_key_value_heads": None}, "'num_key_value_heads' is None; it must be a positive integer"),
        ("Llama", {"rms_norm_eps": None}, "'rms_norm_eps' is None; it must be a number"),
        ("Mistral", {"attention_bias": True}, "'attention_bias' is True, which Mistral models ignore"),
        ("Qwen2", {"attention_bias": False}, "'attention_bias' is False, which Qwen2 models ignore"),
        ("Llama", {"logits_scaling": 8.0}, "'logits_scaling' is 8.0, which Llama models ignore"),
        ("Gemma", {"hidden_activation": "gelu"}, "Gemma models compute 'hidden_act', which is 'gelu_pytorch_tanh'"),
        ("Mixtral", {"num_local_experts": 4, "num_experts": 8}, "are two numbers of experts"),
        ("Ministral", {}, "'head_dim' is None; it must be a number"),
        ("Llama", {"query_pre_attn_scalar": 64}, "'query_pre_attn_scalar' is 64, which Llama models ignore"),
        ("Gemma2", {"no_rope_layers": [1, 0]}, "'no_rope_layers' is [1, 0], which Gemma2 models ignore"),
        ("Gemma2", {"hidden_act": "gelu"}, "Gemma2 models compute 'hidden_activation', which is 'gelu_pytorch_tanh'"),
        ("Mistral", {"layer_types": ["full_attention"]}, "Mistral models have the same attention in all layers"),
    ],
)
def test_what_contradicts_itself_is_refused_in_a_sentence(family: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput) as error:
        complete_config({**BASE, **changes}, family, "m")
    assert says in str(error.value)
