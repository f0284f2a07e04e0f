"""An adapter is small beside its linears, is cut as they are, and is refused where they are not known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from meshwright.profiles.errors import BadInput
from meshwright.profiles.experts import Experts, LatentAttention
from meshwright.profiles.model_parts.adapter import ATTENTION_LINEARS, MLP_LINEARS, Adapter
from meshwright.profiles.model_shape import ModelSpec, model_from_config

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}


@pytest.fixture
def adapted() -> ModelSpec:
    return replace(model_from_config(CONFIG, name="small"), adapter=Adapter(rank=8, alpha=16.0))


def test_every_linear_has_one_product_of_its_inputs_and_one_of_its_outputs(adapted: ModelSpec) -> None:
    assert adapted.adapted_linears == ((64, 128), (64, 64), (64, 192), (96, 64))
    assert adapted.adapter_layer_params == 8 * (64 + 128 + 64 + 64 + 64 + 192 + 96 + 64)
    assert adapted.trainable_params == 3 * adapted.adapter_layer_params


def test_without_an_adapter_all_weights_are_trained(adapted: ModelSpec) -> None:
    plain = replace(adapted, adapter=None)
    assert (plain.adapted_linears, plain.adapter_layer_params) == ((), 0)
    assert plain.trainable_params == plain.num_params == adapted.num_params


def test_a_shard_has_a_part_of_what_the_linears_are_cut_along_and_the_rest_whole(adapted: ModelSpec) -> None:
    shard = adapted.shard(2)
    assert shard.adapted_linears == ((64, 64), (32, 64), (64, 96), (48, 64))


def test_linears_are_cut_along_their_outputs_or_their_inputs() -> None:
    adapter = Adapter(rank=4, alpha=4.0)
    assert (adapter.num_column_parallel, adapter.num_row_parallel, adapter.scale) == (2, 2, 1.0)
    assert Adapter(rank=4, alpha=2.0, targets=("linear_fc2",)).num_column_parallel == 0


MIXED = Experts(num_experts=4, experts_per_token=2, ffn_size=32, shared_ffn_size=48, num_dense_layers=1)


def test_experts_with_biases_are_not_adapted_and_attention_beside_them_is(adapted: ModelSpec) -> None:
    sentence = r"has experts with biases, which are not adapted; set .* to linear_qkv and linear_proj\."
    with pytest.raises(BadInput, match=sentence):
        replace(adapted, experts=MIXED, expert_bias=True)
    attention = Adapter(rank=8, alpha=8.0, targets=ATTENTION_LINEARS)
    assert replace(adapted, experts=MIXED, expert_bias=True, adapter=attention).adapter


def test_adapters_of_experts_are_counted_by_hand(adapted: ModelSpec) -> None:
    """One dense layer of width 96, and two layers with 4 experts of width 32 and a shared one of width 48."""
    mixed = replace(adapted, experts=MIXED)
    attention, dense = 64 + 128 + 64 + 64, 64 + 192 + 96 + 64
    routed, shared = 4 * (64 + 64 + 32 + 64), 64 + 96 + 48 + 64
    assert mixed.adapter_expert_params_between(0, 3) == 2 * 8 * routed
    assert mixed.adapter_params_between(0, 1) == 8 * (attention + dense)
    assert mixed.adapter_params_between(1, 3) == 2 * 8 * (attention + routed + shared)
    assert mixed.trainable_params == 3 * mixed.adapter_layer_params == mixed.adapter_params_between(0, 3)
    alone = replace(mixed, adapter=Adapter(rank=8, alpha=8.0, targets=ATTENTION_LINEARS))
    assert alone.adapter_expert_params_between(0, 3) == 0
    assert not alone.adapts_experts
    assert mixed.adapts_experts


def test_ranks_that_hold_experts_whole_have_fewer_of_their_adapters(adapted: ModelSpec) -> None:
    """With tp=2 either each of 4 experts has a half of B of its first linear and of A of its second, or a rank has two
    whole experts."""
    shard = replace(adapted, experts=MIXED).shard(2)
    assert shard.adapter_expert_params_between(1, 2) == 8 * 4 * (64 + 32 + 16 + 64)
    assert shard.adapter_expert_params_between(1, 2, folded=2) == 8 * 2 * (64 + 64 + 32 + 64)


def test_latent_attention_is_not_adapted(adapted: ModelSpec) -> None:
    latent = LatentAttention(query_rank=0, kv_rank=16, nope_dim=8, rope_dim=8, value_dim=16)
    with pytest.raises(BadInput, match=r"has latent attention, whose projections are not adapted; train it without"):
        replace(adapted, latent=latent)


def test_a_linear_is_listed_once_and_there_is_one_at_least() -> None:
    with pytest.raises(ValidationError, match="targets lists linear_fc1 2 times; list it once"):
        Adapter(rank=8, alpha=8.0, targets=("linear_fc1", *MLP_LINEARS))
    with pytest.raises(ValidationError, match="at least 1 item"):
        Adapter(rank=8, alpha=8.0, targets=())
