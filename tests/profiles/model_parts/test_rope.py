"""Rotary embeddings are read from old and new keys, and two that differ are told."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from meshwright.profiles.errors import BadInput
from meshwright.profiles.model_parts.family_keys import FAMILIES
from meshwright.profiles.model_parts.hf_config import (
    LinearScaling,
    LongScaling,
    Rope,
    RopeScaling,
    YarnScaling,
    rope_from_config,
)
from meshwright.profiles.model_shape import model_from_config, run_violations

LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def rope(**config: Any) -> Rope:
    return rope_from_config(config, 4096, "Llama", "m")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_that_is_left_out_is_that_of_the_family(family: str) -> None:
    known = FAMILIES[family]
    found = rope_from_config({}, 4096, family, "m")
    local_theta = known.parts.local_rope_theta if known.parts.layer_rope else 0.0
    share = known.defaults.get("partial_rotary_factor") or 1.0
    assert found._replace(scaling=None) == Rope(known.rope_theta, share=share, local_theta=local_theta)
    assert bool(found.scaling) is bool(known.rope) is (family == "GptOss")


def test_layers_with_a_window_may_have_a_base_of_their_own() -> None:
    old = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    of_layers = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    expected = Rope(5e5, LinearScaling(factor=8.0), local_theta=2e4)
    assert rope_from_config(old, 4096, "Gemma3", "m") == expected
    assert rope_from_config({"rope_parameters": of_layers}, 4096, "Gemma3", "m") == expected
    with pytest.raises(BadInput, match="must have 'full_attention' and 'sliding_attention' for Gemma3 models"):
        rope_from_config({"rope_parameters": {"rope_theta": 5e5}}, 4096, "Gemma3", "m")


@pytest.mark.parametrize(
    "config",
    [
        {"partial_rotary_factor": 0.25},
        {"rope_parameters": {"partial_rotary_factor": 0.25}},
        {"rope_scaling": {"partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.5},
    ],
)
def test_the_rotated_share_of_a_head_is_read_from_its_parameters_first(config: dict[str, Any]) -> None:
    assert rope_from_config(config, 4096, "Phi3", "m").share == 0.25


def test_a_type_that_a_family_does_not_have_is_refused() -> None:
    with pytest.raises(BadInput, match="Phi3 models have no rotary embedding of type 'llama3'; give one of default"):
        rope_from_config({"rope_scaling": LLAMA3}, 4096, "Phi3", "m")


def test_the_rotated_dimensions_may_be_given_instead() -> None:
    assert rope_from_config({"rotary_dim": 64, "head_dim": 256}, 4096, "MiniMaxM2", "m").share == 0.25
    with pytest.raises(BadInput, match=r"partial_rotary_factor is 1\.5; it must be above 0 and 1 at most"):
        rope_from_config({"partial_rotary_factor": 1.5}, 4096, "Phi3", "m")


def test_the_length_before_stretching_is_the_models_where_it_is_left_out() -> None:
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=4096)
    assert rope(rope_scaling=LLAMA3) == Rope(10000.0, scaling)


@pytest.mark.parametrize("kind", ["dynamic", "proportional"])
def test_types_that_no_cost_depends_on_are_planned(kind: str) -> None:
    assert rope(rope_theta=5e5, rope_scaling={"type": kind, "factor": 4.0}) == Rope(5e5, planned_type=kind)


def test_yarn_has_the_defaults_of_transformers() -> None:
    scaling = YarnScaling(
        factor=4.0,
        beta_fast=32.0,
        beta_slow=1.0,
        original_max_positions=4096,
        attention_factor=0.1 * math.log(4) + 1,
        truncates=True,
    )
    given = {"rope_type": "yarn", "factor": 4.0}
    assert rope(rope_scaling=given) == Rope(10000.0, scaling)
    deepseek = given | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": None}
    stretched = Rope(10000.0, replace(scaling, attention_factor=1.0), latent_score_factor=(0.1 * math.log(4) + 1) ** 2)
    assert rope(rope_scaling=deepseek) == stretched


def test_yarn_with_keys_that_are_not_computed_is_planned_only() -> None:
    given = {"rope_type": "yarn", "factor": 4.0}
    assert rope(rope_scaling=given | {"llama_4_scaling_beta": 0.1}).planned_type == "yarn with llama_4_scaling_beta"


LONG = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}


def test_longrope_has_the_defaults_of_transformers() -> None:
    """The factor is the ratio of both lengths, and that of cosines sqrt(1 + ln 32 / ln 4096)."""
    scaling = LongScaling(
        short_factors=(1.0, 1.5),
        long_factors=(2.0, 4.0),
        original_max_positions=4096,
        attention_factor=math.sqrt(1 + math.log(32) / math.log(4096)),
    )
    for kind in ("longrope", "yarn"):
        found = rope_from_config({"rope_scaling": {"type": kind, **LONG}}, 131072, "Phi3", "m")
        assert found == Rope(10000.0, scaling)
    own = {"type": "longrope", **LONG, "original_max_position_embeddings": 4096}
    assert rope_from_config({"rope_scaling": own}, 131072, "Llama", "m") == Rope(10000.0, scaling)
    assert rope(rope_scaling={"type": "longrope", **LONG}).scaling == replace(scaling, attention_factor=1.0)


@pytest.mark.parametrize("lists", [{}, {"short_factor": [1.0]}, LONG | {"long_factor": [0.0, 1.0]}])
def test_longrope_without_its_lists_is_refused(lists: dict[str, object]) -> None:
    with pytest.raises(BadInput, match=r"rope type longrope has \w+_factor=.*; give a list of numbers above 0"):
        rope(rope_scaling={"type": "longrope", **lists})


def test_longrope_has_a_factor_for_each_rotated_pair_and_one_list_for_a_job() -> None:
    config = {"architectures": ["Phi3ForCausalLM"], "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 32}
    config |= {"intermediate_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 8192}
    model = model_from_config(config | {"rope_scaling": {"type": "longrope", **LONG}}, name="m")
    assert model.rope_scaling == replace(model.for_sequences(4096).rope_scaling, is_long=False)
    assert model.for_sequences(4096) == model
    assert model.for_sequences(4097).rope_scaling == replace(model.rope_scaling, is_long=True)
    assert not list(run_violations(model))
    three = {"type": "longrope", **LONG, "long_factor": [1.0] * 3}
    with pytest.raises(BadInput, match="2 short and 3 long factors; it needs one for each of the 2 rotated pairs"):
        model_from_config(config | {"rope_scaling": three}, name="m")


@pytest.mark.parametrize(
    ("family", "config", "says"),
    [
        ("Llama", {"rope_scaling": {"rope_type": "linear"}}, "'factor' is None; it must be a number"),
        ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor=0; it must be above 0"),
        ("Llama", {"rope_theta": 1, "rope_scaling": {"rope_type": "yarn", "factor": 2}}, "yarn needs one above 1"),
        (
            "Olmo3",
            {"rope_scaling": {"rope_type": "yarn", "factor": 2, "truncate": False}},
            "'truncate' is false, which Olmo3 models ignore",
        ),
        ("Gemma3", {"rope_scaling": {"type": "linear", "factor": 2}}, "has 'type', which Gemma3 models ignore"),
        (
            "Gemma3",
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 2}}},
            "only rope_type default and a rope_theta are supported there",
        ),
    ],
)
def test_scalings_that_are_not_those_of_transformers_are_refused(
    family: str, config: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadInput) as error:
        rope_from_config(config, 4096, family, "m")
    assert says in str(error.value)


def test_what_is_said_twice_alike_is_read() -> None:
    new = {"rope_type": "default", "rope_theta": 5e5}
    assert rope(rope_theta=5e5, rope_parameters=new) == Rope(5e5)
    assert rope(rope_theta=5e5, rope_parameters=LLAMA3, rope_scaling=LLAMA3).theta == 5e5


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
            "rope_theta is 10000.0 in the config and 500000.0",
        ),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 5e5}}, "contradict each other"),
        ({"rope_scaling": {**LLAMA3, "type": "yarn"}}, "has two types, llama3 and yarn"),
        ({"rope_scaling": {"factor": 4.0}}, "has factor, which type 'default' does not know"),
        ({"rope_scaling": {"rope_type": "yarm"}}, "rope type 'yarm' is not known; did you mean 'yarn'?"),
        ({"rope_scaling": {"rope_type": 5}}, "rope type '5' is not known"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "for each kind of layer"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5; only 1 is supported"),
        ({"rope_theta": 0.0}, "'rope_theta' is 0.0; it must be above 0"),
        ({"rope_scaling": "yes"}, "'rope_scaling' is 'yes'; it must be an object"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "and high_freq_factor above low_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, "'factor' is None; it must be a number"),
    ],
)
def test_what_says_two_things_or_nothing_known_is_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput) as error:
        rope(**config)
    assert says in str(error.value)
