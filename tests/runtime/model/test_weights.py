"""Loaded models answer as transformers does, at every layout; written ones are read by it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.model.weights import load_weights, save_weights
from meshwright.runtime.training.trainer import MicroBatch, forward_logprobs, forward_scalars
from tests.runtime.checkpoints import (
    BIASED_LLAMA,
    PLAIN,
    expected_logprobs,
    expected_scores,
    tokens,
    write_checkpoint,
)
from tests.runtime.ranks import run_on_ranks
from tests.seeds import cases

LAYOUTS = ["tp1", "tp2", "tp2,sp", "pp2", "tp2,pp2", "tp2,pp2,sp"]
TOLERANCE = 1e-4


def _answers(directory: Path, layout: str, ids: Tensor, scalar: bool | None) -> list[Tensor] | None:
    """What the ranks of the last stage answer for two micro-batches of different lengths."""
    mesh = build_mesh(Layout.parse(layout), 0)
    if not mesh.is_member:
        return None
    spec = read_model(directory, scalar_head=scalar)
    model = build_model(spec, mesh)
    load_weights(model, spec, mesh, directory)
    blocks = [MicroBatch.pack(ids), MicroBatch.pack(ids[:2, :9])]
    answers = (forward_scalars if spec.scalar_head else forward_logprobs)(model, mesh, blocks)
    return [torch.stack(block.split_rows(answer)) for block, answer in zip(blocks, answers, strict=mesh.is_last_stage)]


def _check(directory: Path, layout: str, expected: Tensor, *, scalar: bool | None = None) -> None:
    """Rows of a causal model do not depend on what follows, so the shorter micro-batch's answers are known too."""
    answers = [answer for answer in run_on_ranks(4, _answers, directory, layout, tokens(), scalar) if answer]
    assert len(answers) == Layout.parse(layout).num_ranks // Layout.parse(layout).pp
    for long, short in answers:
        torch.testing.assert_close(long, expected, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(short[:, :8], expected[:2, :8], atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@cases("layout", LAYOUTS, few=3)
def test_llama_agrees_with_transformers_at_every_layout(tmp_path: Path, layout: str) -> None:
    directory = write_checkpoint(tmp_path / "model")
    _check(directory, layout, expected_logprobs(directory, tokens()))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp1", "tp2,pp2", "tp2,pp2,sp"])
@pytest.mark.parametrize("family", [family for family in PLAIN if family != "Llama"])
def test_every_family_agrees_with_transformers(tmp_path: Path, family: str, layout: str) -> None:
    directory = write_checkpoint(tmp_path / "model", family)
    _check(directory, layout, expected_logprobs(directory, tokens()))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp1", "tp2,pp2,sp"])
def test_biases_on_every_linear_are_loaded(tmp_path: Path, layout: str) -> None:
    directory = write_checkpoint(tmp_path / "model", **BIASED_LLAMA)
    _check(directory, layout, expected_logprobs(directory, tokens()))


@pytest.mark.slow
@cases("layout", LAYOUTS, few=2)
def test_scores_agree_with_transformers(tmp_path: Path, layout: str) -> None:
    directory = write_checkpoint(tmp_path / "model", head="ForSequenceClassification")
    _check(directory, layout, expected_scores(directory, tokens()))


@pytest.mark.slow
def test_a_critic_made_from_a_language_model_starts_at_zero(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", "Gemma")
    _check(directory, "tp2,pp2", torch.zeros(3, 21), scalar=True)


@pytest.mark.slow
def test_a_checkpoint_in_several_files_is_read(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    expected = expected_logprobs(directory, tokens())
    run_on_ranks(4, _convert, directory, "tp2,pp2", directory, tmp_path / "copy")
    assert len(list((tmp_path / "copy").glob("*.safetensors"))) == 4
    _check(tmp_path / "copy", "pp2", expected)


def _convert(source: Path, layout: str, documents: Path, target: Path, scalar: bool | None = None) -> None:
    mesh = build_mesh(Layout.parse(layout), 0)
    if mesh.is_member:
        spec = read_model(source, scalar_head=scalar)
        model = build_model(spec, mesh)
        load_weights(model, spec, mesh, source)
        save_weights(model, spec, mesh, target, config_from=documents, file_bytes=200_000)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp1", "tp2,dp2", "tp2,pp2,sp"])
@pytest.mark.parametrize("family", PLAIN)
def test_what_is_written_is_what_was_read(tmp_path: Path, family: str, layout: str) -> None:
    directory = write_checkpoint(tmp_path / "model", family)
    run_on_ranks(4, _convert, directory, layout, directory, tmp_path / "copy")
    files = (tmp_path / "copy").glob("*.safetensors")
    written = {name: tensor for path in files for name, tensor in load_file(path).items()}
    stored = load_file(directory / "model.safetensors")
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], stored[name]) for name in stored)
    torch.testing.assert_close(
        expected_logprobs(tmp_path / "copy", tokens()), expected_logprobs(directory, tokens()), atol=0, rtol=0
    )


@pytest.mark.slow
def test_a_saved_critic_is_a_classifier_to_transformers(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", "Qwen2")
    run_on_ranks(4, _convert, directory, "tp2", directory, tmp_path / "critic", True)
    assert torch.equal(expected_scores(tmp_path / "critic", tokens()), torch.zeros(3, 21))


def _complaint(directory: Path, config_of: Path) -> str:
    mesh = build_mesh(Layout(), 0)
    if not mesh.is_member:
        return ""
    spec = read_model(config_of)
    try:
        load_weights(build_model(spec, mesh), spec, mesh, directory)
    except BadInput as error:
        return str(error)
    return "nothing was said"


def test_what_is_wrong_with_a_checkpoint_is_said_in_one_sentence(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    stored = load_file(directory / "model.safetensors")

    def complaint(name: str, tensors: dict[str, Tensor] | None) -> str:
        (tmp_path / name).mkdir()
        shutil.copy(directory / "config.json", tmp_path / name)
        if tensors is not None:
            save_file(tensors, tmp_path / name / "model.safetensors")
        return run_on_ranks(1, _complaint, tmp_path / name, directory)[0]

    assert "holds no weights" in complaint("empty", None)
    missing = {name: tensor for name, tensor in stored.items() if name != "model.norm.weight"}
    assert "has no tensor 'model.norm.weight'" in complaint("missing", missing)
    wrong = {**stored, "lm_head.weight": torch.zeros(261, 64)}
    assert "'lm_head.weight' has shape (261, 64) and model model needs (260, 64)" in complaint("wrong", wrong)
    (tmp_path / "wrong" / "model.safetensors").write_bytes(b"not tensors")
    assert "cannot be read" in run_on_ranks(1, _complaint, tmp_path / "wrong", directory)[0]
