"""The layers that are not megatron's own: norms by their equation, scalar heads, and what a layer is made of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from meshwright.profiles.experts import Experts
from meshwright.runtime.model.layers import RMSNorm, ScalarHead, block_of_layers
from tests.planner.jobs import model_spec

HIDDEN, EPSILON = 16, 1e-5


def config(dtype: torch.dtype = torch.float32, *, offset: bool = False) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        params_dtype=dtype,
        layernorm_zero_centered_gamma=offset,
        cuda_graph_scope=[],  # the default warns of itself
    )


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def normalised(hidden: Tensor) -> Tensor:
    return hidden / (hidden.square().mean(-1, keepdim=True) + EPSILON).sqrt()


@pytest.mark.parametrize("offset", [False, True])
def test_a_norm_divides_by_the_root_of_the_mean_square_and_scales(offset: bool) -> None:
    norm, hidden, scale = RMSNorm(config(offset=offset), HIDDEN, EPSILON), drawn(5, 1, HIDDEN), drawn(HIDDEN)
    torch.testing.assert_close(norm(hidden), normalised(hidden))  # as it is made, whatever its weight is relative to
    norm.weight.data.copy_(scale - float(offset))
    torch.testing.assert_close(norm(hidden), normalised(hidden) * scale)


def test_a_small_relative_weight_is_not_rounded_away() -> None:
    """Of 1 + 2^-8 bf16 keeps nothing but the one."""
    norm, hidden = RMSNorm(config(torch.bfloat16, offset=True), HIDDEN, EPSILON), drawn(64, 1, HIDDEN).bfloat16()
    plain = norm(hidden)
    norm.weight.data.fill_(2**-8)
    assert 1 + norm.weight[0] == 1
    assert norm(hidden).dtype is torch.bfloat16
    assert (norm(hidden) != plain).float().mean() > 0.25
    assert torch.equal(norm(hidden), (normalised(hidden.float()) * (1 + 2**-8)).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scalar_head_starts_at_zero_and_answers_one_fp32_number_for_each_token(dtype: torch.dtype) -> None:
    head, hidden = ScalarHead(config(dtype), tp_group=None), drawn(7, 1, HIDDEN).to(dtype)  # type: ignore[arg-type]
    numbers, bias = head(hidden)
    assert (tuple(numbers.shape), numbers.dtype, bias) == ((7, 1, 1), torch.float32, None)
    assert not numbers.any()
    head.weight.data.copy_(drawn(1, HIDDEN))
    torch.testing.assert_close(head(hidden)[0][:, 0], hidden[:, 0].float() @ head.weight[0].float()[:, None])


def test_a_stage_has_a_layer_for_each_of_its_numbers_and_experts_where_the_model_has() -> None:
    spec = model_spec("actor")
    mixture = replace(spec, experts=Experts(num_experts=4, experts_per_token=2, ffn_size=96))
    for model, mlp in ((spec, MLP), (mixture, MoELayer)):
        block = block_of_layers(model, range(3, 5))
        assert len(block.layer_specs) == 2
        assert {layer.submodules.mlp.module for layer in block.layer_specs} == {mlp}


@pytest.mark.parametrize("has_norm", [False, True])
def test_queries_and_keys_are_normed_where_the_model_says(has_norm: bool) -> None:
    attention = block_of_layers(replace(model_spec("actor"), qk_norm=has_norm), range(1)).layer_specs[0].submodules
    found = attention.self_attention.submodules
    assert (found.q_layernorm is RMSNorm, found.k_layernorm is RMSNorm) == (has_norm, has_norm)
