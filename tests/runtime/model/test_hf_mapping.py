"""Names and shapes of a checkpoint: what is cut over ranks joins again, and every parameter is some stage's."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from meshwright.profiles.experts import Experts
from meshwright.profiles.model_shape import ModelSpec
from meshwright.runtime.model.hf_checkpoint import (
    EMBEDDING,
    OUTPUT,
    Recipe,
    StoredTensor,
    expert_of,
    global_name,
    parameters_of_stage,
    recipe,
    starts_at_zero,
)
from tests.planner.jobs import model_spec

PLAIN = replace(model_spec("actor"), num_kv_heads=2, vocab_size=250)
MIXTURE = Experts(num_experts=4, experts_per_token=2, ffn_size=96)
SPECS = {
    "plain": PLAIN,
    "tied": replace(PLAIN, tied_embeddings=True, qk_norm=True),
    "biased": replace(PLAIN, qkv_bias=True, output_bias=True, mlp_bias=True),
    "scalar": replace(PLAIN, architecture="LlamaForSequenceClassification", scalar_head=True),
    "Mixtral": replace(PLAIN, architecture="MixtralForCausalLM", experts=MIXTURE),
    "Qwen3Moe": replace(PLAIN, architecture="Qwen3MoeForCausalLM", experts=MIXTURE),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def cut(made: Recipe, stored: dict[str, Tensor], tp_rank: int, tp: int) -> Tensor:
    """A rank's shard, as it is read: what lies beyond a stored tensor is zero."""
    if made.axis is None:
        return stored[made.tensors[0].name]
    parts = []
    for tensor in made.tensors:
        start, stop = made.span(tensor, tp_rank, tp)
        part = stored[tensor.name].narrow(made.axis, start, min(stop, tensor.shape[made.axis]) - start)
        parts.append(torch.cat([part, part.new_zeros(stop - start - part.shape[made.axis], *part.shape[1:])]))
    return made.join(parts, tp)


@every_spec
@pytest.mark.parametrize("tp", [1, 2])
def test_shards_of_every_parameter_split_into_the_tensors_that_were_cut(spec: ModelSpec, tp: int) -> None:
    draw = torch.Generator().manual_seed(0)
    for parameter in parameters_of_stage(spec, 1, 0):
        made = recipe(spec, parameter)
        stored = {tensor.name: torch.randn(tensor.shape, generator=draw) for tensor in made.tensors}
        found = made.split([cut(made, stored, rank, tp) for rank in range(tp)])
        assert found.keys() == stored.keys()
        for name, tensor in stored.items():
            assert torch.equal(found[name], tensor), name


def test_the_heads_of_a_group_lie_side_by_side_with_their_key_and_value() -> None:
    """Four query heads in two groups: those of a group, then its key, then its value."""
    made = recipe(PLAIN, "decoder.layers.0.self_attention.linear_qkv.weight")
    sizes = [tensor.shape[0] // PLAIN.head_dim for tensor in made.tensors]
    numbers = torch.arange(sum(sizes)).repeat_interleave(PLAIN.head_dim).split([n * PLAIN.head_dim for n in sizes])
    joined = made.join(numbers, tp=1)[:: PLAIN.head_dim]
    assert joined.tolist() == [0, 1, 4, 6, 2, 3, 5, 7]


@every_spec
@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (2, 2)])
def test_the_stages_of_a_pipeline_store_every_parameter_once(spec: ModelSpec, pp: int, vpp: int) -> None:
    stored = [name for stage in range(pp) for name in parameters_of_stage(spec, pp, stage, vpp)]
    assert Counter(stored) == Counter(parameters_of_stage(spec, 1, 0))
    assert EMBEDDING in parameters_of_stage(spec, pp, 0, vpp)
    assert (OUTPUT in parameters_of_stage(spec, pp, pp - 1, vpp)) == (not spec.tied_embeddings)


@every_spec
def test_no_two_parameters_are_made_of_one_stored_tensor(spec: ModelSpec) -> None:
    stored = [tensor.name for name in parameters_of_stage(spec, 1, 0) for tensor in recipe(spec, name).tensors]
    assert len(set(stored)) == len(stored)


def test_families_name_their_experts_each_in_its_way() -> None:
    parameter = "decoder.layers.3.mlp.experts.local_experts.2.linear_fc2.weight"
    names = {family: recipe(SPECS[family], parameter).tensors for family in ("Mixtral", "Qwen3Moe")}
    assert names == {
        "Mixtral": (StoredTensor("model.layers.3.block_sparse_moe.experts.2.w2.weight", (64, 96)),),
        "Qwen3Moe": (StoredTensor("model.layers.3.mlp.experts.2.down_proj.weight", (64, 96)),),
    }


def test_layers_and_experts_of_a_rank_are_counted_through_the_whole_model() -> None:
    mine = "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight"
    assert global_name(mine, 4, 2) == "decoder.layers.5.mlp.experts.local_experts.2.linear_fc1.weight"
    assert expert_of(global_name(mine, 4, 2)) == 2
    assert global_name("decoder.layers.0.mlp.router.weight", 3) == "decoder.layers.3.mlp.router.weight"
    assert global_name(EMBEDDING, 3) == EMBEDDING
    assert expert_of(EMBEDDING) is None


def test_only_the_head_of_a_model_that_had_none_starts_from_nothing() -> None:
    new = replace(PLAIN, scalar_head=True)
    assert [name for name in parameters_of_stage(new, 1, 0) if starts_at_zero(new, name)] == [OUTPUT]
    for spec in (PLAIN, SPECS["scalar"]):
        assert not any(starts_at_zero(spec, name) for name in parameters_of_stage(spec, 1, 0))
