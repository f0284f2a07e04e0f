"""A rank's shard: its parameters by their names in the whole model, its answers row by row, and what is not built."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.profiles.errors import BadInput
from meshwright.profiles.experts import Experts
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_parts.adapter import Adapter
from meshwright.profiles.model_parts.family_keys import FAMILIES
from meshwright.profiles.model_shape import ModelSpec, read_model
from meshwright.runtime.device import host
from meshwright.runtime.model.hf_checkpoint import OUTPUT, parameters_of_stage
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model, model_chunks_of, named_global_parameters
from tests.planner.jobs import model_spec
from tests.runtime.configs import SHAPES
from tests.runtime.ranks import run_on_ranks

SPEC = replace(model_spec("actor"), num_kv_heads=2, vocab_size=250)
LENGTHS = (7, 1, 4)
TOKENS = torch.arange(sum(LENGTHS)).unsqueeze(0) * 17 % SPEC.vocab_size


def _names(layout: str, tied: bool) -> tuple[int, list[str]]:
    """This rank's stage, and the parameters that its shard has."""
    mesh = build_mesh(Layout.parse(layout), 0)
    model = build_model(replace(SPEC, tied_embeddings=tied), mesh)
    assert len(model_chunks_of(model)) == mesh.layout.vpp
    return mesh.pp_rank, [name for name, _ in named_global_parameters(model)]


@pytest.mark.parametrize("layout", ["pp2,vpp2", "pp4"])
def test_a_shard_has_the_parameters_of_its_stage_and_the_copy_of_a_tied_embedding(layout: str) -> None:
    parsed, num_ranks = Layout.parse(layout), Layout.parse(layout).num_ranks
    for tied in (False, True):
        spec = replace(SPEC, tied_embeddings=tied)
        for stage, names in run_on_ranks(num_ranks, _names, layout, tied):
            stored = {*parameters_of_stage(spec, parsed.pp, stage, parsed.vpp)}
            assert set(names) - stored == ({OUTPUT} if tied and stage == parsed.pp - 1 else set())
            assert stored <= set(names)
            assert len(set(names)) == len(names)


def _answers() -> tuple[Tensor, Tensor, list[Tensor]]:
    """Logits of packed rows, of their ends alone, and of each row by itself."""
    model = build_model(SPEC, build_mesh(Layout(), dist.get_rank()))
    with torch.no_grad():
        alone = [model(tokens, (tokens.shape[1],)) for tokens in TOKENS.split(LENGTHS, dim=1)]
        return model(TOKENS, LENGTHS), model(TOKENS, LENGTHS, ends_only=True), alone


def test_packed_rows_answer_as_each_does_alone_and_their_ends_alone_as_among_all() -> None:
    [(together, ends, alone)] = run_on_ranks(1, _answers)
    assert together.shape == (sum(LENGTHS), 1, SPEC.padded_vocab_size)
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=0)
    torch.testing.assert_close(ends, together[torch.tensor(LENGTHS).cumsum(0) - 1], atol=1e-5, rtol=0)
    assert together[..., : SPEC.vocab_size].isfinite().all()
    assert (together[..., SPEC.vocab_size :] == -torch.inf).all()


def _weights(seed: int, trainable: bool) -> tuple[Tensor, bool, bool]:
    """All weights of a model one behind the other, whether all want gradients, and whether it is in training."""
    model = build_model(SPEC, build_mesh(Layout(), dist.get_rank()), seed=seed, trainable=trainable)
    parameters = list(model.parameters())
    wanted = {parameter.requires_grad for parameter in parameters}
    assert len(wanted) == 1
    return torch.cat([parameter.detach().flatten() for parameter in parameters]), wanted.pop(), model.training


def test_the_seed_decides_the_weights_and_a_model_that_is_not_trained_wants_no_gradients() -> None:
    (one, *still), (same, *moving), (other, *_) = (
        run_on_ranks(1, _weights, *how)[0] for how in ((0, False), (0, True), (1, False))
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert (still, moving) == ([False, False], [True, True])


def _whole_weights(spec: ModelSpec, layout: str) -> dict[str, Tensor]:
    """The weights that are whole on every tensor-parallel rank, after each rank has used torch's generator its way."""
    rank = dist.get_rank()
    torch.rand(1 + rank)
    before = torch.get_rng_state()
    model = build_model(spec, build_mesh(Layout.parse(layout), 0), seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if not getattr(parameter, "tensor_model_parallel", False) and parameter.dim() > 1
    }


@pytest.mark.parametrize("family", ["DeepseekV2", "Qwen2Moe"])
def test_weights_that_are_not_sharded_follow_from_the_seed_on_every_rank(tmp_path: Path, family: str) -> None:
    names = {"architectures": [f"{family}ForCausalLM"], "model_type": FAMILIES[family].model_type}
    config = SHAPES[family] | names
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_model(tmp_path)
    one, other = run_on_ranks(2, _whole_weights, spec, "tp2")
    assert one
    assert not [name for name in one if not torch.equal(one[name], other[name])]
    [alone] = run_on_ranks(1, _whole_weights, spec, "tp1")
    assert not [name for name in one if not torch.equal(one[name], alone[name])]


def _places(spec: ModelSpec, trainable: bool) -> dict[str, str]:
    """The kind of device of each parameter and buffer, in a process whose device is none that torch falls back on."""
    mesh = build_mesh(Layout(), dist.get_rank())
    with mock.patch.object(host, "_chosen", torch.device("meta")):
        model = build_model(spec, mesh, trainable=trainable)
    return {name: tensor.device.type for name, tensor in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, qkv_bias=True, qk_norm=True, tied_embeddings=True),
        replace(
            SPEC, architecture="MixtralForCausalLM", experts=Experts(num_experts=4, experts_per_token=2, ffn_size=96)
        ),
        replace(SPEC, scalar_head=True, tied_embeddings=False),
        replace(SPEC, adapter=Adapter(rank=4, alpha=8)),
    ],
    ids=["dense", "experts", "scalar head", "adapter"],
)
def test_all_of_a_model_is_made_on_the_device_of_the_process(spec: ModelSpec, trainable: bool) -> None:
    [places] = run_on_ranks(1, _places, spec, trainable)
    assert {name for name, kind in places.items() if kind != "meta"} == set()
    assert places


def _refusal() -> str:
    mesh = build_mesh(Layout(tp=3), 0)
    try:
        build_model(SPEC, mesh)
    except BadInput as error:
        return str(error)
    return "nothing was said"


def test_a_layout_that_does_not_divide_the_model_is_refused() -> None:
    assert all("tp=3 does not divide the 4 attention heads" in said for said in run_on_ranks(3, _refusal))
