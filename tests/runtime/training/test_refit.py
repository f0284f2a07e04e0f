"""Weights moved to another layout are the weights that were trained."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshwright.runtime.training.refit as module
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_parts.adapter import Adapter
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.model.adapters import init_adapter
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model, named_global_parameters
from meshwright.runtime.model.weights import load_weights
from meshwright.runtime.training.refit import RefitCopy
from meshwright.runtime.training.trainer import MicroBatch, Trainer, forward_logprobs, forward_scalars
from tests.runtime.checkpoints import tokens, write_checkpoint
from tests.runtime.ranks import run_on_ranks
from tests.runtime.updates import blocks, language_loss, value_loss

Place = tuple[str, int]  # a layout and its first rank


def _train_and_refit(
    directory: Path, source: Place, target: Place, adapter: Adapter | None = None
) -> tuple[Tensor | None, Tensor | None, int]:
    """What trained source and refit target answer, where this rank can say, and how many transfers it takes part in.

    Twice an update and a refit, in small buckets; the target begins with weights of its own, or with an `adapter` of
    zeros.
    """
    module.BUCKET_BYTES = 10_000
    source_mesh, target_mesh = (build_mesh(Layout.parse(layout), first) for layout, first in (source, target))
    spec = replace(read_model(directory), adapter=adapter)
    trained = trainer = refitted = None
    if source_mesh.is_member:
        trained = build_model(spec, source_mesh, trainable=True)
        load_weights(trained, spec, source_mesh, directory)
        layout = source_mesh.layout
        named = dict(named_global_parameters(trained))
        init_adapter(named, 0, tp=layout.tp, tp_rank=source_mesh.tp_rank, etp=layout.etp)
        trainer = Trainer(trained, source_mesh, learning_rate=1e-2)
    if target_mesh.is_member:
        refitted = build_model(spec, target_mesh, seed=7)
        if adapter:
            load_weights(refitted, spec, target_mesh, directory)
    refit = RefitCopy(trained, source_mesh, refitted, target_mesh)
    for _ in range(2):
        if trainer is not None:
            loss = value_loss if spec.scalar_head else language_loss
            trainer.train_step(blocks(2, source_mesh), functools.partial(loss, spec, source_mesh))
        refit.run()
    forward = forward_scalars if spec.scalar_head else forward_logprobs
    answers = [
        (forward(model, mesh, [MicroBatch.pack(tokens())]) or [None])[0] if model is not None else None
        for model, mesh in ((trained, source_mesh), (refitted, target_mesh))
    ]
    return answers[0], answers[1], refit.num_messages


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "source", "target"),
    [
        ("Llama", ("tp2,dp2,sp", 0), ("pp2,dp2", 0)),
        ("Llama", ("pp2,dp2", 0), ("tp2,dp2", 0)),
        ("Llama", ("tp2", 0), ("tp1", 2)),  # disjoint, and rank 3 looks on
        ("Llama", ("dp2", 0), ("tp2", 2)),
        ("Llama", ("tp2,pp2", 0), ("dp2", 1)),  # nested
        ("Qwen2", ("pp2", 0), ("tp2", 1)),  # tied embeddings, biases
        ("Qwen2", ("tp2", 0), ("pp2,dp2", 0)),
        ("Qwen2", ("pp2", 0), ("pp2", 2)),
        ("Qwen3", ("tp2,dp2", 0), ("pp4", 0)),
    ],
)
def test_the_target_answers_as_the_source_after_an_update(
    tmp_path: Path, family: str, source: Place, target: Place
) -> None:
    _check(write_checkpoint(tmp_path / "model", family), source, target)


@pytest.mark.slow
def test_a_critic_is_refit_with_its_head(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", head="ForSequenceClassification")
    _check(directory, ("tp2,sp", 0), ("pp2", 2))


def _check(directory: Path, source: Place, target: Place, adapter: Adapter | None = None) -> None:
    answers = run_on_ranks(4, _train_and_refit, directory, source, target, adapter)
    known = [answer for answer, _, _ in answers if answer is not None]
    moved = [answer for _, answer, _ in answers if answer is not None]
    assert len(known) == Layout.parse(source[0]).num_ranks // Layout.parse(source[0]).pp
    assert len(moved) == Layout.parse(target[0]).num_ranks // Layout.parse(target[0]).pp
    for answer in moved:
        torch.testing.assert_close(answer, known[0], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_the_same_layout_on_the_same_ranks_sends_nothing(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    answers = run_on_ranks(4, _train_and_refit, directory, ("tp2,dp2", 0), ("tp2,dp2", 0))
    assert [num_messages for _, _, num_messages in answers] == [0, 0, 0, 0]


def _given_ahead(directory: Path, source: Place, target: Place) -> list[Tensor]:
    """The source gives its weights twice, after an update each, and goes on; the target comes when it has. What both
    answer in the end, where this rank can say."""
    module.BUCKET_BYTES = 10_000
    source_mesh, target_mesh = (build_mesh(Layout.parse(layout), first) for layout, first in (source, target))
    spec = read_model(directory)
    trained = build_model(spec, source_mesh, trainable=True) if source_mesh.is_member else None
    refitted = build_model(spec, target_mesh, seed=7) if target_mesh.is_member else None
    trainer = Trainer(trained, source_mesh, learning_rate=1e-2) if trained is not None else None
    refits = [RefitCopy(trained, source_mesh, refitted, target_mesh, number=number) for number in range(2)]
    for _ in range(2):
        if trainer is not None:
            for refit in refits:
                refit.wait()
            trainer.train_step(blocks(2, source_mesh), functools.partial(language_loss, spec, source_mesh))
            for refit in refits:
                refit.start_send()
                refit.run()
        dist.barrier()
        if refitted is not None:
            for refit in reversed(refits):
                refit.run()
    for refit in refits:
        refit.wait()
    pairs = ((trained, source_mesh), (refitted, target_mesh))
    return [
        answer
        for model, mesh in pairs
        if model is not None
        for answer in forward_logprobs(model, mesh, [MicroBatch.pack(tokens())])
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), [(("tp2", 0), ("tp1", 2)), (("pp2", 0), ("dp2", 2))])
def test_a_source_gives_its_weights_to_another_pool_without_waiting_for_it(
    tmp_path: Path, source: Place, target: Place
) -> None:
    directory = write_checkpoint(tmp_path / "model")
    found = [a for answers in run_on_ranks(4, _given_ahead, directory, source, target, timeout=120) for a in answers]
    assert len(found) >= 2
    for answer in found:
        torch.testing.assert_close(answer, found[0], atol=1e-5, rtol=0)


def _given_where_ranks_are_shared(directory: Path) -> bool:
    """Whether a target that shares a rank with its source gets the weights of when both have come, and no earlier."""
    meshes = build_mesh(Layout.parse("tp2"), 0), build_mesh(Layout(), 1)
    spec = read_model(directory)
    source, target = (build_model(spec, mesh) if mesh.is_member else None for mesh in meshes)
    assert source is not None
    refit = RefitCopy(source, meshes[0], target, meshes[1])
    refit.start_send()
    if dist.get_rank() == 0:
        refit.wait()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.fill_(3.0)
    refit.run()
    refit.wait()
    return target is None or all(bool((parameter == 3.0).all()) for parameter in target.parameters())


@pytest.mark.slow
def test_pools_that_share_a_rank_meet_in_a_refit(tmp_path: Path) -> None:
    assert all(run_on_ranks(2, _given_where_ranks_are_shared, write_checkpoint(tmp_path / "model"), timeout=120))


def _to_bf16(directory: Path) -> float:
    """The largest difference between fp32 weights and their refit in bf16 on another rank, relative to them."""
    spec = read_model(directory)
    source_mesh, target_mesh = build_mesh(Layout(), 0), build_mesh(Layout(), 1)
    source = build_model(spec, source_mesh) if source_mesh.is_member else None
    target = build_model(spec, target_mesh, dtype=torch.bfloat16, seed=1) if target_mesh.is_member else None
    RefitCopy(source, source_mesh, target, target_mesh).run()
    if target is None:
        return 0.0
    original = build_model(spec, target_mesh)  # of the same seed as the source
    pairs = zip(original.parameters(), target.parameters(), strict=True)
    return max(float(((a - b).abs() / (a.abs() + 1e-6)).max()) for a, b in pairs)


@pytest.mark.slow
def test_weights_are_converted_to_the_dtype_of_the_target(tmp_path: Path) -> None:
    assert 0 < max(run_on_ranks(4, _to_bf16, write_checkpoint(tmp_path / "model"))) < 2**-7


def _groups_of_two() -> int:
    """The groups that a second refit between the same meshes makes."""
    meshes = build_mesh(Layout.parse("tp2"), 0), build_mesh(Layout.parse("dp2"), 1)
    RefitCopy(None, meshes[0], None, meshes[1])
    count = dist.get_pg_count()
    RefitCopy(None, meshes[0], None, meshes[1])
    return dist.get_pg_count() - count


def test_refits_between_the_same_ranks_share_a_group() -> None:
    assert run_on_ranks(4, _groups_of_two) == [0] * 4


def _run_alone(directory: Path) -> bool:
    """Ranks 2 and 3 have no part in a refit of ranks 0 and 1, and do not call it."""
    spec = read_model(directory)
    source_mesh, target_mesh = build_mesh(Layout(), 0), build_mesh(Layout(), 1)
    source = build_model(spec, source_mesh) if source_mesh.is_member else None
    target = build_model(spec, target_mesh, seed=1) if target_mesh.is_member else None
    refit = RefitCopy(source, source_mesh, target, target_mesh)
    if dist.get_rank() < 2:
        refit.run()
    return True


@pytest.mark.slow
def test_ranks_without_a_part_need_not_wait(tmp_path: Path) -> None:
    assert all(run_on_ranks(4, _run_alone, write_checkpoint(tmp_path / "model"), timeout=60))
