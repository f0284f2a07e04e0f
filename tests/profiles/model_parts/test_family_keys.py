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
    "head_dim",
    "n_group",
    "num_key_value_heads",
    "num_mtp_layers",
    "rope_interleave",
    "routed_scaling_factor",
    "swiglu_alpha",
    "swiglu_limit",
    "topk_group",
    "topk_method",
}
"""Keys of families that are planned and not run, on which no cost depends."""


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_the_configuration_class(family: str) -> None:
    known, of_class = FAMILIES[family], getattr(transformers, f"{family}Config")
    theirs = {field.name: field for field in fields(of_class)}
    assert known.model_type == of_class.model_type
    assert known.rope_theta == of_class.default_theta
    assert known.defaults.keys() - theirs.keys() == known.added
    shared = known.defaults.keys() & theirs.keys()
    assert {key: known.defaults[key] for key in shared} == {key: theirs[key].default for key in shared}
    assert {key for key in shared if known.may_be_null(key)} == {
        key for key in shared if "None" in str(theirs[key].type)
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_the_class_is_read_or_known_to_shape_nothing(family: str) -> None:
    theirs = {field.name for field in fields(getattr(transformers, f"{family}Config"))}
    of_planned = OF_PLANNED if family.startswith(("Deepseek", "GptOss")) else set()
    assert theirs - FAMILIES[family].defaults.keys() - PASSED_OVER - of_planned == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_other_names_of_keys_are_those_of_the_class(family: str) -> None:
    theirs, known = getattr(transformers, f"{family}Config").attribute_map, FAMILIES[family]
    for alias, key in known.aliases.items():
        assert theirs.get(alias, alias) == theirs.get(key, key)
