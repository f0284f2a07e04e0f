"""Families whose layers differ are trained, generated from, moved and saved as others are."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import pytest
import torch
import transformers
from torch import Tensor

from meshwright.profiles.layout import Layout
from meshwright.profiles.model_parts.hf_config import LongScaling
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.execution.model_export import export_models
from meshwright.runtime.execution.train import run_plan
from meshwright.runtime.model.hf_checkpoint import recipe
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model, named_global_parameters
from meshwright.runtime.model.weights import load_weights
from meshwright.runtime.training.trainer import MicroBatch, forward_logprobs
from tests.runtime import small_job
from tests.runtime.checkpoints import (
    FAMILIES,
    PLAIN,
    WINDOWS,
    expected_logprobs,
    expected_scores,
    name_end_tokens,
    tokens,
    write_checkpoint,
)
from tests.runtime.laws.test_experts import DELTAS, LATENT, mixture
from tests.runtime.laws.test_experts import FAMILIES as EXPERTS
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

LAYOUTS = ("tp2,pp2,sp", "tp1", "tp2,pp2")
OTHERS = [family for family in FAMILIES if family not in PLAIN]


@cases(("family", "layout"), [(family, layout) for layout in LAYOUTS for family in OTHERS], few=len(OTHERS))
def test_log_probabilities_are_those_of_transformers(tmp_path: Path, family: str, layout: str) -> None:
    directory = write_checkpoint(tmp_path / "model", family)
    check_logprobs(directory, layout, expected_logprobs(directory, tokens()))


@cases(("family", "layout"), [(family, layout) for layout in LAYOUTS for family in OTHERS], few=2)
def test_what_is_written_is_what_was_read(tmp_path: Path, family: str, layout: str) -> None:
    directory = write_checkpoint(tmp_path / "model", family)
    run_on_ranks(4, _convert, directory, layout, directory, tmp_path / "copy")
    copy, stored = written(tmp_path / "copy"), written(directory)
    assert copy.keys() == stored.keys()
    assert all(torch.equal(copy[name], stored[name]) for name in stored)


@cases(
    ("family", "layout"), [(family, layout) for layout in LAYOUTS for family in WINDOWS], few=[("Qwen2", LAYOUTS[0])]
)
def test_with_a_window_log_probabilities_are_those_of_transformers(tmp_path: Path, family: str, layout: str) -> None:
    directory = write_checkpoint(tmp_path / "model", family, **WINDOWS[family])
    check_logprobs(directory, layout, expected_logprobs(directory, tokens()))


@pytest.mark.check_all
@pytest.mark.parametrize("family", ["Gemma2", "Gemma3", "Olmo3"])
def test_scores_with_a_window_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    directory = write_checkpoint(tmp_path / "model", family)
    run_on_ranks(4, _convert, directory, "tp2", directory, tmp_path / "critic", True)
    assert torch.equal(expected_scores(tmp_path / "critic", tokens()), torch.zeros(3, 21))


def _loss(logits: Tensor, ids: Tensor) -> Tensor:
    """The sum of the squares of log-probabilities of next tokens; logits [B, S, V], ids [B, S]."""
    return logits.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).square().sum() / 1000


def _gradients(directory: Path, ids: Tensor) -> dict[str, Tensor] | None:
    """Gradients of the loss on one rank, by the names of the checkpoint."""
    mesh = build_mesh(Layout(), 0)
    if not mesh.is_member:
        return None
    spec = read_model(directory)
    model = build_model(spec, mesh, trainable=True)
    load_weights(model, spec, mesh, directory)
    rows, length = ids.shape
    packed = model(ids.view(1, -1), (length,) * rows)[..., : spec.vocab_size]
    _loss(packed.view(rows, length, -1), ids).backward()
    found: dict[str, Tensor] = {}
    stacks = defaultdict[str, list[Tensor]](list)
    for name, parameter in named_global_parameters(model):
        assert parameter.grad is not None, name
        instructions = recipe(spec, name)
        for stored, grad in instructions.split([parameter.grad]).items():
            if instructions.is_stacked:
                stacks[stored].append(grad)
            else:
                found[stored] = grad.clone()
    return found | {stored: torch.stack(grads) for stored, grads in stacks.items()}


@cases(
    "family",
    [*OTHERS, "Gemma", "Qwen3", "Qwen2Moe", "Glm4Moe", "MiniMaxM2", *LATENT, "GptOss", "Llama4", *DELTAS],
    few=["Gemma2", "Olmo2", "Granite", "DeepseekV3", "Llama4"],
)
def test_gradients_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """But those of routed experts where transformers holds as one parameter what is stored in several."""
    directory, ids = tmp_path / "model", tokens()
    mixture(directory, family) if family in EXPERTS else write_checkpoint(directory, family)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    _loss(model(ids).logits, ids).backward()
    [stored] = filter(None, run_on_ranks(4, _gradients, directory, ids))
    found = {name.replace(".block_sparse_moe.", ".mlp."): gradient for name, gradient in stored.items()}
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    if family not in ("GptOss", "Llama4"):
        expected = {name: gradient for name, gradient in expected.items() if ".experts." not in name}
        found = {name: gradient for name, gradient in found.items() if ".experts." not in name}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient is not None
        rows = found[name][: len(gradient)]
        torch.testing.assert_close(rows, gradient, atol=2e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


HOWS = [
    How("tp2,sp", 1, "selective"),
    How("tp2,pp2,sp", 2),
    How("pp2,dp2", 1, "full"),
    How("tp2,dp2", 2),
    How("pp2,dp2,vpp2", 1),
]


@cases("family", ["Olmo2", "Granite", "Glm4", "SmolLM3", "Phi3", "Qwen3_5"], few=1)
def test_an_update_is_the_same_however_it_is_computed(tmp_path: Path, family: str) -> None:
    assert_updates_are_those_of_one_rank(write_checkpoint(tmp_path / "model", family), HOWS, tmp_path)


@pytest.mark.check_all
@pytest.mark.parametrize("family", ["Gemma2", "Gemma3", "Olmo3"])
def test_an_update_with_a_window_is_the_same_however_it_is_computed(tmp_path: Path, family: str) -> None:
    """Context-parallel ranks have slices of a row, whose windows reach into those of others."""
    hows = [*HOWS, How("cp2", 2), How("cp2,tp2,sp", 1, "selective")]
    assert_updates_are_those_of_one_rank(write_checkpoint(tmp_path / "model", family), hows, tmp_path)


@pytest.mark.check_all
@pytest.mark.parametrize("family", ["Olmo2", "Glm4", "Qwen3_5"])
@pytest.mark.parametrize(("source", "target"), [(("tp2,sp", 0), ("pp2", 2)), (("pp2,dp2", 0), ("tp2", 1))])
def test_weights_are_moved_between_layouts(tmp_path: Path, family: str, source: Place, target: Place) -> None:
    check_refit(write_checkpoint(tmp_path / "model", family), source, target)


@pytest.mark.check_all
def test_a_saved_trainer_goes_on_where_it_was(tmp_path: Path) -> None:
    """The norm over all heads is sharded by one layout, and whole in the other."""
    write_checkpoint(tmp_path / "actor", "Olmo2")
    places, others = ({"actor": (layout, 0)} for layout in ("tp2,dp2,sp", "pp2,dp2"))
    whole = _merge(tmp_path, Run(places=places, num_updates=3))
    start = _merge(tmp_path, Run(places=places, num_updates=1, written=tmp_path / "saved"))
    rest = _merge(tmp_path, Run(places=others, num_updates=2, read=tmp_path / "saved"))
    assert start["actor"] + rest["actor"] == pytest.approx(whole["actor"], rel=1e-4)


@pytest.mark.check_all
@pytest.mark.parametrize("family", OTHERS)
def test_a_job_runs_and_is_resumed_in_another_layout(tmp_path: Path, family: str) -> None:
    """What is generated has the log-probabilities that training computes, before and after a refit."""
    job, out = write_job(tmp_path, num_ranks=2), tmp_path / "out"
    rmtree(tmp_path / "actor")
    changes = {**FAMILIES[family], "vocab_size": small_job.VOCAB_SIZE}
    write_checkpoint(tmp_path / "actor", family, **changes)
    name_end_tokens(tmp_path / "actor", small_job.EOS)
    stages = ("actor_generate", "actor_logprob", "actor_train")
    cut = [f"{stage}.layout=tp2{'' if stage == 'actor_generate' else ',sp'}" for stage in stages]
    assert run_plan(request(job, out, *cut, steps=2))
    assert run_plan(request(job, out, *(f"{stage}.layout=pp2" for stage in stages), steps=3, resume=True))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    assert all(line["generator_gap"] < 1e-4 for line in lines)


LONGROPE = {
    "tie_word_embeddings": False,
    "original_max_position_embeddings": 16,
    "rope_parameters": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.5, 3.0, 2.0, 2.5] * 2},
}


@cases("layout", ["tp1", "tp2,pp2,sp"], few=1)
def test_long_rows_have_the_long_factors_of_longrope(tmp_path: Path, layout: str) -> None:
    """Rows of 21 tokens are longer than the original length, and rows of 16 are not."""
    directory = write_checkpoint(tmp_path / "model", "Phi3", **LONGROPE)
    for ids, longest in ((tokens(), 21), (tokens(length=16), 16)):
        expected = expected_logprobs(directory, ids)
        answers = run_on_ranks(4, _logprobs_of_jobs, directory, layout, ids, longest)
        for answer in (answer for answer in answers if answer is not None):
            torch.testing.assert_close(answer, expected[:, :-1], atol=1e-4, rtol=0)


def _logprobs_of_jobs(directory: Path, layout: str, ids: Tensor, longest: int) -> Tensor | None:
    """Log-probabilities [B, S - 1] by the model of a job with sequences of up to `longest` tokens; None before the last
    stage."""
    mesh, spec = build_mesh(Layout.parse(layout), 0), read_model(directory).for_sequences(longest)
    if not mesh.is_member:
        return None
    model = build_model(spec, mesh)
    load_weights(model, spec, mesh, directory)
    block = MicroBatch.pack(ids)
    answers = forward_logprobs(model, mesh, [block])
    return torch.stack(block.split_rows(answers[0]))[:, :-1] if answers and mesh.is_last_stage else None


@pytest.mark.check_all
def test_a_job_with_long_sequences_generates_and_exports_with_the_long_factors(tmp_path: Path) -> None:
    """Its sequences have up to 32 tokens; prompts alone are shorter than the original length."""
    job, out = write_job(tmp_path, num_ranks=2), tmp_path / "out"
    rmtree(tmp_path / "actor")
    write_checkpoint(tmp_path / "actor", "Phi3", **LONGROPE, vocab_size=small_job.VOCAB_SIZE)
    name_end_tokens(tmp_path / "actor", small_job.EOS)
    asked = request(job, out, "actor_generate.layout=pp2", "actor_logprob.layout=tp2", steps=2)
    actor = asked.plan.facts.models.actor
    assert isinstance(actor.rope_scaling, LongScaling)
    assert actor.rope_scaling.is_long
    assert run_plan(asked)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert all(line["generator_gap"] < 1e-4 for line in lines)
    export_models(out, tmp_path / "trained", models={})
    assert read_model(tmp_path / "trained" / "actor").rope_scaling == replace(actor.rope_scaling, is_long=False)
