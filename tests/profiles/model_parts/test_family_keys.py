"""The defaults of a family are those of its configuration class in transformers, and every key of that is accounted
for."""

from __future__ import annotations

from dataclasses import fields

import pytest
import transformers

from meshwright.profiles.model_parts.family_keys import FAMILIES

PASSED_OVER = {
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "rope_parameters",  # read with the older keys, which no class has
    "router_aux_loss_coef",
    "router_jitter_noise",
    "transformers_version",
    "use_bidirectional_attention",  # refused
    "use_cache",
}
"""Keys that shape no model here."""

OF_PLANNED = {
    "attention_bias",
    "attn_scale",
    "attn_temperature_tuning",
    "embd_pdrop",
    "expand",
    "floor_scale",
    "head_dim",
    "hidden_dropout",
    "layer_types",
    "mamba_hidden_act",
    "mamba_proj_bias",
    "mamba_ssm_cache_dtype",
    "moe_shared_expert_overlap",
    "mtp_layers_block_type",
    "n_group",
    "num_key_value_heads",
    "num_logits_to_keep",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "original_max_position_embeddings",
    "resid_pdrop",
    "residual_in_fp32",
    "rescale_prenorm_residual",
    "rope_interleave",
    "routed_scaling_factor",
    "swiglu_alpha",
    "swiglu_limit",
    "time_step_floor",
    "time_step_limit",
    "time_step_max",
    "time_step_min",
    "topk_group",
    "topk_method",
    "use_mamba_kernels",
}
"""Keys of families that are planned and not run, on which no cost depends."""


UNREAD = {"NemotronH": {"sliding_window"}, "Gemma3": {"attn_logit_softcapping"}, "DeepseekV2": {"head_dim"}}
"""Keys of a class that no model of it reads."""

PREDICTION_LAYERS = {"num_mtp_layers", "num_nextn_predict_layers"}
"""Keys of layers of published weights that are not read."""

RUN = (
    *("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Olmo3", "Mixtral", "Qwen3Moe"),
    *("DeepseekV2", "DeepseekV3", "GptOss"),
)
TEXT_MODELS = ("Gemma3", "Llama4", "Qwen3_5", "Qwen3_5Moe")


def config_class(family: str) -> type:
    """The configuration class of the family, of the text model if it has others."""
    found: type = getattr(transformers, f"{family}{'Text' * (family in TEXT_MODELS)}Config")
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_the_configuration_class(family: str) -> None:
    known, of_class = FAMILIES[family], config_class(family)
    theirs = {field.name: field for field in fields(of_class)}
    assert known.model_type == of_class.model_type
    theta = of_class.default_theta
    if isinstance(theta, dict):
        assert (known.rope_theta, known.parts.local_rope_theta) == (theta["global"], theta["local"])
    else:
        assert known.rope_theta == theta
    assert known.defaults.keys() - theirs.keys() == known.added
    shared = known.defaults.keys() & theirs.keys()
    assert {key: known.defaults[key] for key in shared} == {key: theirs[key].default for key in shared}
    assert {key for key in shared if known.may_be_null(key)} == {
        key for key in shared if "None" in str(theirs[key].type)
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_the_class_is_read_or_known_to_shape_nothing(family: str) -> None:
    theirs = {field.name for field in fields(config_class(family))}
    of_planned = OF_PLANNED if family not in RUN else PREDICTION_LAYERS
    assert theirs - FAMILIES[family].defaults.keys() - PASSED_OVER - of_planned == UNREAD.get(family, set())


@pytest.mark.parametrize("family", FAMILIES)
def test_other_names_of_keys_are_those_of_the_class(family: str) -> None:
    theirs, known = config_class(family).attribute_map, FAMILIES[family]
    for alias, key in known.aliases.items():
        assert theirs.get(alias, alias) == theirs.get(key, key)
