"""Models with experts are loaded, trained, generated from, moved and saved as dense ones are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from meshwright.cost_models.period_ends import AllSequences, FirstEnded
from meshwright.planner.plan.micro_batch_rules import ExtraChoices
from meshwright.planner.search.legal_choices import legal_choices
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.experts import Experts
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_parts.adapter import Adapter
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.execution.train import run_plan
from meshwright.runtime.inference.slots import Response
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.model.weight_check import weight_violations
from meshwright.runtime.model.weights import load_weights
from meshwright.runtime.training.trainer import MicroBatch, forward_logprobs
from tests.planner.jobs import small_facts
from tests.runtime import small_job
from tests.runtime.checkpoints import (
    DELTA,
    SHAPE,
    STRETCHED,
    expected_logprobs,
    name_end_tokens,
    tokens,
    write_checkpoint,
)
from tests.runtime.inference.test_engine import PROMPTS, VOCAB_SIZE, generate, open_generator
from tests.runtime.model.test_weights import _check as check_logprobs
from tests.runtime.model.test_weights import _convert
from tests.runtime.ranks import run_on_ranks
from tests.runtime.small_job import request, write_job
from tests.runtime.training.test_checkpoint import Run, _merge
from tests.runtime.training.test_refit import Place
from tests.runtime.training.test_refit import _check as check_refit
from tests.runtime.updates import How, assert_updates_are_those_of_one_rank, written
from tests.seeds import cases

pytestmark = pytest.mark.slow

FACTS = small_facts(batch_size=16, num_minibatches=4)

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.1,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "rope_parameters": _YARN,
    "tie_word_embeddings": False,
}
LATENT: dict[str, dict[str, Any]] = {
    "DeepseekV2": _LATENT | {"q_lora_rank": None, "n_shared_experts": 2, "topk_method": "group_limited_greedy"},
    "DeepseekV3": _LATENT | {"q_lora_rank": 24, "n_shared_experts": 1},
}
"""Families with latent attention, in whose rotary embeddings the scaling changes the scores too."""

_DELTA: dict[str, Any] = DELTA | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}
DELTAS: dict[str, dict[str, Any]] = {"Qwen3Next": _DELTA | {"mlp_only_layers": [1]}, "Qwen3_5Moe": _DELTA}
"""Families with gated delta layers, one with a plain MLP between experts."""

FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "head_dim": 32,
        "norm_topk_prob": True,
    },
    "Qwen2Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 32,
        "decoder_sparse_step": 1,
    },
    "Glm4Moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "use_qk_norm": True,
        "attention_bias": True,
        "head_dim": 32,
    },
    "MiniMaxM2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "rotary_dim": 16},
    **LATENT,
    "GptOss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "head_dim": 32,
        "sliding_window": 6,
        "swiglu_limit": 0.4,
        "swiglu_alpha": 1.5,
        "rope_parameters": _YARN | {"truncate": False},
        "tie_word_embeddings": False,
    },
    **DELTAS,
    "Llama4": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 192,  # twice an expert, as published
        "head_dim": 16,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 6,
        "floor_scale": 3,
        "attn_scale": 0.3,
        "rope_parameters": STRETCHED,
        "tie_word_embeddings": False,
    },
}


def mixture(directory: Path, family: str = "Mixtral", **changes: Any) -> Path:
    return write_checkpoint(directory, family, **FAMILIES[family], **changes)


DIVIDED = ["tp2", "dp2,ep2", "tp2,dp2,ep2", "pp2,dp2,ep2", "tp2,ep2,etp1"]


def planned(stage: str) -> list[str]:
    """Every layout on two and on four ranks that a plan may give to this stage of a mixture."""
    spec = replace(FACTS.models.actor, experts=Experts(num_experts=4, experts_per_token=2, ffn_size=96), num_kv_heads=2)
    facts = FACTS.model_copy(update={"models": FACTS.models.model_copy(update={"actor": spec, "ref": spec})})
    stages, wanted = PPO_GRAPH.by_name, ExtraChoices(all_layouts=True)
    found = (
        choice.layout
        for size in (2, 4)
        for choice in legal_choices(facts, stages[stage], size, (), extra_choices=wanted)
    )
    return [str(layout) for layout in sorted(set(found))]


OF_EACH_KIND = [
    "tp2,pp1,dp1",
    "tp1,pp1,dp4,ep2",
    "tp1,pp2,dp2,ep2",
    "tp2,pp1,dp2,ep2",
    "tp2,pp1,dp2,ep2,sp",
    "tp2,pp1,dp2,ep4,etp1",
    "tp2,pp2,dp1,ep2,etp1,sp",
]
"""Planned layouts in which experts are held whole or in parts, by replicas or by ranks that share the rest."""


@cases("layouts", [OF_EACH_KIND, planned("ref_logprob")], few=1, ids=["of each kind", "all"])
def test_experts_agree_with_transformers_in_planned_layouts(tmp_path: Path, layouts: list[str]) -> None:
    directory = mixture(tmp_path / "model")
    expected = expected_logprobs(directory, tokens())
    assert set(OF_EACH_KIND) < set(planned("ref_logprob"))
    for layout in ("tp1", *layouts):
        check_logprobs(directory, layout, expected)


@cases("layout", ["tp1", "tp2,dp2,ep2,sp", "tp2,pp2,ep2,etp1,sp", *DIVIDED], few=2)
def test_experts_of_a_width_of_their_own_agree_with_transformers(tmp_path: Path, layout: str) -> None:
    directory = mixture(tmp_path / "model", "Qwen3Moe")
    check_logprobs(directory, layout, expected_logprobs(directory, tokens()))


@cases("layout", ["tp2,dp2,ep2,sp", "tp1", "tp2,pp2,ep2,etp1,sp", *DIVIDED], few=1)
def test_shared_experts_and_their_gate_agree_with_transformers(tmp_path: Path, layout: str) -> None:
    directory = mixture(tmp_path / "model", "Qwen2Moe")
    check_logprobs(directory, layout, expected_logprobs(directory, tokens()))


@cases("layout", ["tp2,pp2,ep2,etp1,sp", "tp1", "tp2,dp2,ep2,sp", *DIVIDED], few=1)
def test_sigmoid_routers_with_groups_and_dense_layers_before_agree_with_transformers(
    tmp_path: Path, layout: str
) -> None:
    directory = mixture(tmp_path / "model", "Glm4Moe")
    check_logprobs(directory, layout, expected_logprobs(directory, tokens()))


@cases("layout", ["tp2,pp2,ep2,etp1,sp", "tp1", "tp2,dp2,ep2,sp", *DIVIDED], few=1)
def test_a_norm_over_all_heads_that_are_rotated_in_part_agrees_with_transformers(tmp_path: Path, layout: str) -> None:
    directory = mixture(tmp_path / "model", "MiniMaxM2")
    check_logprobs(directory, layout, expected_logprobs(directory, tokens()))


@cases("family", LATENT, few=["DeepseekV2"])
@cases("layout", ["tp2,pp2,ep2,etp1,sp", "tp1", "tp2", "pp2", "tp2,dp2,ep2,sp", *DIVIDED], few=1)
def test_latent_attention_agrees_with_transformers(tmp_path: Path, layout: str, family: str) -> None:
    directory = mixture(tmp_path / "model", family)
    check_logprobs(directory, layout, expected_logprobs(directory, tokens()))


@cases("layout", ["tp2,dp2,ep2,sp", "tp1", "tp2", "pp2", "tp2,pp2,ep2,etp1,sp", *DIVIDED], few=1)
def test_sinks_and_clamped_experts_with_biases_agree_with_transformers(tmp_path: Path, layout: str) -> None:
    directory = mixture(tmp_path / "model", "GptOss")
    check_logprobs(directory, layout, expected_logprobs(directory, tokens()))


@cases("layout", ["tp2,pp2,ep2,etp1,sp", "tp1", "tp2", "pp2", "tp2,dp2,ep2,sp", *DIVIDED], few=1)
def test_chunks_and_layers_without_positions_and_scaled_inputs_agree_with_transformers(
    tmp_path: Path, layout: str
) -> None:
    directory = mixture(tmp_path / "model", "Llama4")
    check_logprobs(directory, layout, expected_logprobs(directory, tokens()))


@pytest.mark.check_all
@pytest.mark.parametrize("family", DELTAS)
@pytest.mark.parametrize("layout", ["tp2,pp2,ep2,etp1,sp", "tp1", "tp2", "pp2", "tp2,dp2,ep2,sp", *DIVIDED])
def test_gated_delta_layers_agree_with_transformers(tmp_path: Path, layout: str, family: str) -> None:
    directory = mixture(tmp_path / "model", family)
    check_logprobs(directory, layout, expected_logprobs(directory, tokens()))


def _as_published(directory: Path) -> Path:
    """A Qwen3.5 MoE of images and text, with experts in stacks and layers that predict further tokens, whose config is
    that of its text."""
    images = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.Qwen3_5MoeConfig(text_config={**SHAPE, **DELTAS["Qwen3_5Moe"]}, vision_config=images)
    model = transformers.Qwen3_5MoeForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    directory.mkdir()
    tensors = {**model.state_dict(), "mtp.norm.weight": torch.ones(64)}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config.text_config.to_dict()))
    return directory


@pytest.mark.check_all
def test_the_text_of_llama_4_is_read_from_the_weights_of_a_model_of_images(tmp_path: Path) -> None:
    directory = mixture(tmp_path / "model", "Llama4")
    expected, tensors = expected_logprobs(directory, tokens()), written(directory)
    images = {name: torch.ones(2) for name in ("vision_model.class_embedding", "multi_modal_projector.linear_1.weight")}
    (directory / "model.safetensors").unlink()
    save_file(
        {f"language_model.{name}": tensor for name, tensor in tensors.items()} | images, directory / "model.safetensors"
    )
    assert not list(weight_violations(read_model(directory), directory))
    check_logprobs(directory, "tp2", expected)


@pytest.mark.check_all
def test_the_text_of_a_published_model_of_images_is_read_and_written_for_transformers(tmp_path: Path) -> None:
    directory = _as_published(tmp_path / "model")
    assert {"model.visual", "model.language_model"} < {".".join(name.split(".")[:2]) for name in written(directory)}
    assert not list(weight_violations(read_model(directory), directory))
    expected = expected_logprobs(directory, tokens())
    for layout in ("tp1", "tp2,dp2,ep2,sp"):
        check_logprobs(directory, layout, expected)
    run_on_ranks(4, _convert, directory, "tp2", directory, tmp_path / "copy")
    assert torch.equal(expected_logprobs(tmp_path / "copy", tokens()), expected)


def test_weights_of_a_tokens_experts_need_not_sum_to_one(tmp_path: Path) -> None:
    changes = FAMILIES["Qwen3Moe"] | {"norm_topk_prob": False}
    directory = write_checkpoint(tmp_path / "model", "Qwen3Moe", **changes)
    check_logprobs(directory, "tp1", expected_logprobs(directory, tokens()))


HOWS = {
    "Mixtral": [
        How("tp1,pp1,dp4,ep2", 1),
        How("tp2,pp1,dp2,ep2,sp", 1),
        How("tp1,pp2,dp2,ep2,vpp2", 1),
        How("tp2,pp1,dp2,ep4,etp1,sp", 1),
        How("tp2,pp2,dp1,ep2,etp1,sp", 1),
    ],
    "Qwen3Moe": [
        How("tp2,sp", 2, "full"),
        How("tp2,dp2,ep2,sp", 1, "selective"),
        How("tp2,dp2,ep2,etp1,sp", 1, "full"),
        How("tp2,pp2,ep2,etp1,sp", 2),
        How("pp2,dp2,ep2", 1, "full"),
        How("pp2,dp2,ep2,vpp2", 1),
    ],
    "Qwen2Moe": [
        How("tp2,sp", 2, "full"),
        How("tp2,dp2,ep2,etp1,sp", 1, "full"),
        How("pp2,dp2,ep2,vpp2", 1),
    ],
    "MiniMaxM2": [How("tp2,dp2,ep2,etp1,sp", 1, "selective"), How("pp2,dp2,ep2", 1, "full")],
    **{
        family: [
            How("tp2,sp", 2, "full"),
            How("tp2,dp2,ep2,etp1,sp", 1, "selective"),
            How("pp2,dp2,ep2,vpp2", 1),
        ]
        for family in (*LATENT, "GptOss", "Llama4", *DELTAS)
    },
    "Glm4Moe": [
        How("tp2,sp", 2, "full"),
        How("tp2,dp2,ep2,etp1,sp", 1, "selective"),
        How("pp2,dp2,ep2", 1, "full"),
        How("pp2,dp2,ep2,vpp2", 1),
    ],
}


@cases("family", FAMILIES, few=["Mixtral"])
def test_an_update_of_experts_is_the_same_however_it_is_computed(tmp_path: Path, family: str) -> None:
    assert_updates_are_those_of_one_rank(mixture(tmp_path / "model", family), HOWS[family], tmp_path)


@pytest.mark.check_all
def test_an_update_of_experts_is_the_same_in_every_planned_layout(tmp_path: Path) -> None:
    every = [How(layout, 1) for layout in planned("actor_train")]
    assert set(HOWS["Mixtral"]) < set(every)
    assert_updates_are_those_of_one_rank(mixture(tmp_path / "model"), every, tmp_path)


def _different_rows(directory: Path, layout: str) -> list[Tensor] | None:
    """Log-probabilities of the rows of this rank's replica, one a micro-batch: three of the first, none of the last."""
    mesh = build_mesh(Layout.parse(layout), 0)
    spec = read_model(directory)
    model = build_model(spec, mesh)
    load_weights(model, spec, mesh, directory)
    ids = tokens()
    rows = range(len(ids)) if mesh.dp_rank == 0 else ()
    answers = forward_logprobs(model, mesh, [MicroBatch.pack([ids[row, : 21 - 4 * row]]) for row in rows])
    return answers if mesh.is_last_stage and mesh.dp_rank == 0 else None


@cases("layout", ["tp2,dp2,ep2,sp", "pp2,dp2,ep2", "tp2,dp2,ep4,etp1,sp", "tp2,dp2,ep4,etp1"], few=1)
def test_replicas_that_hold_experts_together_may_have_different_numbers_of_rows(tmp_path: Path, layout: str) -> None:
    directory = mixture(tmp_path / "model")
    expected = expected_logprobs(directory, tokens())
    for answers in filter(None, run_on_ranks(4, _different_rows, directory, layout)):
        for row, answer in enumerate(answers):
            torch.testing.assert_close(answer[:-1], expected[row, : len(answer) - 1], atol=1e-4, rtol=0)


def _draw_in_turns(directory: Path, layout: str) -> list[list[Response]] | None:
    """What three turns deliver on this replica, which has every `dp`-th prompt but the last has none at first."""
    opened = open_generator(directory, layout, 2)
    if opened is None:
        return None
    generator, _, mesh = opened
    mine = PROMPTS[mesh.dp_rank :: mesh.layout.dp]
    first = mine[: 3 if mesh.dp_rank == 0 else 0]
    deliveries = (FirstEnded(1, 2), FirstEnded(2, 2), AllSequences())
    admitted = (first, mine[len(first) :], ())
    return [
        list(generator.run_period(prompts, version=0, delivery=delivery))
        for prompts, delivery in zip(admitted, deliveries, strict=True)
    ]


@cases(
    "layout",
    ["tp2", "dp4,ep2", "tp2,dp2,ep2", "pp2,dp2,ep2", "tp2,ep2,etp1", "tp2,dp2,ep4,etp1", "tp2,dp2,ep2,etp1"],
    few=1,
)
def test_replicas_that_hold_experts_together_draw_at_their_own_pace(tmp_path: Path, layout: str) -> None:
    """Prompts are admitted unevenly, responses end at different lengths, and some stay in flight from turn to turn."""
    directory = mixture(tmp_path / "actor", vocab_size=VOCAB_SIZE)
    alone = run_on_ranks(4, generate, directory, "tp1", 1)[0]
    assert alone is not None
    expected = {response.row: response.tokens for response in alone[0]}
    assert len({len(drawn) for drawn in expected.values()}) > 1
    found = [turns for turns in run_on_ranks(4, _draw_in_turns, directory, layout) if turns is not None]
    delivered = {response.row: response.tokens for turns in found for turn in turns for response in turn}
    assert delivered == expected
    assert len(found) == Layout.parse(layout).num_ranks


@pytest.mark.check_all
def test_a_generator_offered_layouts_draws_what_its_trainer_scores(tmp_path: Path) -> None:
    directory = mixture(tmp_path / "actor", vocab_size=VOCAB_SIZE)
    alone = run_on_ranks(4, generate, directory, "tp1", 1)[0]
    assert alone is not None
    assert max(alone[1]) < 1e-4
    for answer in run_on_ranks(4, generate, directory, "pp2", 4):
        assert answer is None or [r.tokens for r in answer[0]] == [r.tokens for r in alone[0]]


def write_mixture_job(directory: Path, family: str = "Mixtral") -> Path:
    """The small job on two ranks with a mixture for its actor and reference."""
    path = write_job(directory, num_ranks=2)
    rmtree(directory / "actor")
    mixture(directory / "actor", family, vocab_size=small_job.VOCAB_SIZE)
    name_end_tokens(directory / "actor", small_job.EOS)
    return path


@pytest.mark.check_all
@pytest.mark.parametrize(
    "family", ["Mixtral", "Qwen2Moe", "Glm4Moe", "MiniMaxM2", *LATENT, "GptOss", "Llama4", *DELTAS]
)
def test_a_job_whose_experts_are_divided_runs_and_is_resumed_in_other_layouts(tmp_path: Path, family: str) -> None:
    """At first two replicas hold half of the experts each, then two ranks of one half of each expert, and half of them
    whole in the end."""
    job, out = write_mixture_job(tmp_path, family), tmp_path / "out"
    stages = ("actor_generate", "actor_logprob", "actor_train")
    spread = [f"{stage}.layout=dp2,ep2" for stage in stages]
    cut = [f"{stage}.layout=tp2{'' if stage == 'actor_generate' else ',sp'}" for stage in stages]
    assert run_plan(request(job, out, *spread, "ref_logprob.layout=tp2", steps=1))
    assert run_plan(request(job, out, *cut, "ref_logprob.layout=dp2,ep2", steps=2, resume=True))
    whole = [f"{stage}.layout=tp2,ep2,etp1{'' if stage == 'actor_generate' else ',sp'}" for stage in stages]
    assert run_plan(request(job, out, *whole, "ref_logprob.layout=tp2,ep2,etp1", steps=3, resume=True))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    assert all(line["generator_gap"] < 1e-4 for line in lines)


MOVES: list[tuple[Place, Place]] = [
    (("pp2,dp2", 0), ("dp2", 1)),
    (("dp2,ep2", 0), ("tp2", 2)),
    (("tp2,sp", 0), ("dp2,ep2", 1)),
    (("tp2,dp2,ep2,sp", 0), ("pp2,dp2,ep2", 0)),
    (("dp4,ep2", 0), ("dp4,ep4", 0)),
    (("tp2,dp2,ep4,etp1,sp", 0), ("tp2,dp2,ep2", 0)),
    (("tp2,ep2,etp1,sp", 0), ("tp2", 2)),
    (("tp2,sp", 0), ("tp2,ep2,etp1", 2)),
    (("dp4,ep4", 0), ("tp2,dp2,ep2,etp1", 0)),
]


@cases(("source", "target"), MOVES, few=2)
def test_experts_are_moved_to_those_who_hold_them(tmp_path: Path, source: Place, target: Place) -> None:
    check_refit(mixture(tmp_path / "model"), source, target)


@pytest.mark.check_all
@pytest.mark.parametrize(("source", "target"), MOVES[2:])
def test_adapters_of_experts_are_moved_to_those_who_hold_them(tmp_path: Path, source: Place, target: Place) -> None:
    check_refit(mixture(tmp_path / "model", "Qwen2Moe"), source, target, Adapter(rank=4, alpha=32.0))


@pytest.mark.check_all
@pytest.mark.parametrize("family", ["DeepseekV2", "GptOss", "Qwen3Next"])
@pytest.mark.parametrize(("source", "target"), [MOVES[3], MOVES[6], MOVES[7]])
def test_projections_to_latent_vectors_sinks_biases_of_experts_and_delta_layers_are_moved(
    tmp_path: Path, family: str, source: Place, target: Place
) -> None:
    check_refit(mixture(tmp_path / "model", family), source, target)


@cases("family", ["Glm4Moe", "MiniMaxM2", "Mixtral", "Qwen2Moe", *LATENT, "GptOss", "Llama4", *DELTAS], few=["Glm4Moe"])
@cases("layout", ["tp2", "pp2,dp2,ep2", "dp4,ep4", "tp2,dp2,ep4,etp1", "tp2,pp2,ep2,etp1"], few=1)
def test_written_experts_are_those_that_were_read(tmp_path: Path, layout: str, family: str) -> None:
    directory = mixture(tmp_path / "model", family)
    run_on_ranks(4, _convert, directory, layout, directory, tmp_path / "copy")
    copy, stored = written(tmp_path / "copy"), written(directory)
    assert copy.keys() == stored.keys()
    assert all(torch.equal(copy[name], stored[name]) for name in stored)


WHOLE_AND_CUT = [("tp2,dp2,ep4,etp1,sp", "tp2,dp2,ep2,sp"), ("tp2,sp", "tp2,dp2,ep2,etp1,sp")]


@cases(
    ("first", "then", "family"),
    [
        ("dp2", "pp2", "Qwen3Moe"),
        ("dp2,ep2", "tp2,sp", "Glm4Moe"),
        ("tp2,dp2,sp", "pp2,dp2,ep2", "Qwen3Moe"),
        ("dp4,ep2", "dp2,ep2", "Qwen3Moe"),
        (*WHOLE_AND_CUT[0], "Mixtral"),
        (*WHOLE_AND_CUT[1], "Qwen3Moe"),
        (*WHOLE_AND_CUT[1], "DeepseekV3"),
        (*WHOLE_AND_CUT[1], "GptOss"),
        (*WHOLE_AND_CUT[1], "Qwen3Next"),
        ("tp2,dp2,sp", "pp2,dp2,ep2", "GptOss"),
    ],
    few=1,
)
def test_a_saved_trainer_of_experts_goes_on_where_it_was(tmp_path: Path, first: str, then: str, family: str) -> None:
    """The layers of the second case differ, and its routers have biases that are kept."""
    mixture(tmp_path / "actor", family)
    places, others = ({"actor": (layout, 0)} for layout in (first, then))
    whole = _merge(tmp_path, Run(places=places, num_updates=3))
    start = _merge(tmp_path, Run(places=places, num_updates=1, written=tmp_path / "saved"))
    rest = _merge(tmp_path, Run(places=others, num_updates=2, read=tmp_path / "saved"))
    assert start["actor"] + rest["actor"] == pytest.approx(whole["actor"], rel=1e-4)
