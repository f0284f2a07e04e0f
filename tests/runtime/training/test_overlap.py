"""Exchanges between replicas that overlap computing give the weights of those that do not."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.profiles.layout import Layout
from meshwright.profiles.model_parts.adapter import Adapter
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.model.kernel_choice import PLAIN, ChosenKernels
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import Recompute, build_model
from meshwright.runtime.model.weights import load_weights
from meshwright.runtime.training.checkpoint import load_trainers, publish, take_snapshot
from meshwright.runtime.training.replica_overlap import Buckets, overlap_buckets
from meshwright.runtime.training.trainer import Trainer, forward_logprobs
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.ranks import run_on_ranks
from tests.runtime.updates import HEADS, blocks, language_loss, value_loss
from tests.seeds import cases

SMALLEST = Buckets(1)
"""A layer each, which is many for a small model."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Updates of a small model: one of several micro-batches, one for which the last replica has no rows, one that is
    refused, and one of a single micro-batch."""

    layout: str
    buckets: Buckets | None
    recompute: Recompute = "none"
    scalar: bool = False


@dataclass(frozen=True)
class Seen:
    """What one rank found."""

    weights: list[Tensor]
    norms: list[float]
    losses: list[float]
    logprobs: list[Tensor]
    """Of a forward pass right behind the updates."""
    num_started: int
    """Sums that were in flight when the backward pass of the first update was over, most of all ranks' buckets."""
    were_on_their_way: bool
    """Weights, when an update within others was done."""


def _updates(directory: Path, asked: Asked) -> Seen | None:
    mesh = build_mesh(Layout.parse(asked.layout), 0)
    if not mesh.is_member:
        return None
    spec = read_model(directory, scalar_head=asked.scalar)
    model = build_model(spec, mesh, recompute=asked.recompute, trainable=True)
    load_weights(model, spec, mesh, directory)
    # A norm is summed over the ranks' parts, which buckets cut otherwise: no clipping, so that weights are bit for bit.
    trainer = Trainer(model, mesh, learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1e9, buckets=asked.buckets)
    started = _note_started(trainer)
    loss = functools.partial(value_loss if asked.scalar else language_loss, spec, mesh)
    is_idle = mesh.dp_rank == mesh.layout.dp - 1
    with trainer.successive_updates():
        metrics = [trainer.train_step(blocks(1, mesh), loss)]
        on_their_way = any(group.param_gather_handle is not None for group in _groups(trainer))
        metrics.append(trainer.train_step([] if is_idle else blocks(1, mesh), loss))
        metrics.append(trainer.train_step(blocks(1, mesh), loss, condition=lambda _: False))
        metrics.append(trainer.train_step(blocks(4, mesh) if mesh.layout.vpp == 1 else blocks(1, mesh), loss))
    assert not any(group.param_gather_handle is not None for group in _groups(trainer))
    trainer.train_step(blocks(1, mesh), loss)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    scores = asked.scalar or mesh.layout.vpp > 1
    logprobs = [] if scores else forward_logprobs(model, mesh, blocks(2, mesh))  # type: ignore[arg-type]
    norms, losses = [one["grad_norm"] for one in metrics], [one["loss"] for one in metrics]
    return Seen(weights, norms, losses, logprobs, started[0], on_their_way)


def _groups(trainer: Trainer) -> list[Any]:
    return [group for chunk in trainer.ddp_chunks for group in chunk.bucket_groups]


def _note_started(trainer: Trainer) -> list[int]:
    """The number of sums in flight each time that gradients are finished."""
    started: list[int] = []
    finish = trainer.model.config.finalize_model_grads_func

    def noted(*args: Any, **options: Any) -> None:
        started.append(sum(group.grad_reduce_handle is not None for group in _groups(trainer)))
        finish(*args, **options)

    trainer.model.config.finalize_model_grads_func = noted
    return started


def _same(directory: Path, plain: Asked, num_ranks: int = 2) -> list[Seen]:
    """What overlapping ranks saw, which is bit for bit what others did, but for the norms of gradients.

    Of four ranks gloo adds in another order where they are cut otherwise.
    """
    exact = Layout.parse(plain.layout).cp == 1
    expected = run_on_ranks(num_ranks, _updates, directory, plain)
    found = run_on_ranks(num_ranks, _updates, directory, Asked(**{**vars(plain), "buckets": SMALLEST}))
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert other is not None
        assert one.losses == (other.losses if exact else pytest.approx(other.losses, rel=1e-4))
        assert one.norms == pytest.approx(other.norms, rel=1e-5 if exact else 1e-3)
        if exact:
            assert all(map(torch.equal, one.weights, other.weights))
            assert all(map(torch.equal, one.logprobs, other.logprobs))
        assert (other.num_started, other.were_on_their_way) == (0, False)
    return [one for one in found if one]


@pytest.mark.slow
@cases(
    ("family", "scalar", "recompute"),
    [("Llama", False, "none"), ("Llama", True, "selective"), ("Qwen2", False, "full"), ("Qwen3", False, "selective")],
    few=2,
)
def test_updates_are_bit_for_bit_those_without_overlap(
    tmp_path: Path, family: str, scalar: bool, recompute: Recompute
) -> None:
    directory = write_checkpoint(tmp_path / "model", family, head=HEADS[scalar])
    for seen in _same(directory, Asked(layout="dp2", buckets=None, recompute=recompute, scalar=scalar)):
        assert seen.num_started > 3
        assert seen.were_on_their_way


@pytest.mark.slow
@cases("layout", ["pp2,dp2", "tp2,dp2,sp", "pp2,dp2,vpp2", "dp2,cp2"], few=2)
def test_so_they_are_with_pipelines_and_with_cut_models(tmp_path: Path, layout: str) -> None:
    directory = write_checkpoint(tmp_path / "model", "Qwen2")
    assert all(seen.were_on_their_way for seen in _same(directory, Asked(layout=layout, buckets=None), num_ranks=4))


def _saved_and_loaded(directory: Path, saved: Path, written: Buckets | None, read: Buckets | None) -> list[float]:
    """Losses of two updates and, from what is saved behind them, of two more."""
    mesh = build_mesh(Layout(dp=2), 0)
    spec = read_model(directory)
    loss = functools.partial(language_loss, spec, mesh)
    losses: list[float] = []
    for buckets in (written, read):
        model = build_model(spec, mesh, trainable=True)
        load_weights(model, spec, mesh, directory)
        trainer = Trainer(model, mesh, learning_rate=1e-2, buckets=buckets)
        if losses:
            load_trainers(saved, {"actor": trainer})
        losses += [trainer.train_step(blocks(2, mesh), loss)["loss"] for _ in range(2)]
        if not saved.exists():
            publish(take_snapshot(saved, {"actor": trainer}))
    return losses


@pytest.mark.slow
def test_what_is_saved_with_overlap_goes_on_without_and_the_other_way_round(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", "Qwen2")
    ways = [(None, None), (SMALLEST, None), (None, SMALLEST), (SMALLEST, SMALLEST)]
    known, *others = (
        run_on_ranks(2, _saved_and_loaded, directory, tmp_path / str(number), *way) for number, way in enumerate(ways)
    )
    for found in others:
        assert found[0] == pytest.approx(known[0], rel=1e-5)


def _own(directory: Path) -> list[bool]:
    mesh = build_mesh(Layout(dp=2), 0)
    spec = read_model(directory)
    adapted = replace(spec, adapter=Adapter(rank=2, alpha=2.0))
    models = [build_model(one, mesh, trainable=True) for one in (spec, adapted)]
    overlapping = ChosenKernels(overlaps_replicas=True)
    return [overlap_buckets(model, mesh, kernels) is not None for kernels in (PLAIN, overlapping) for model in models]


def test_all_weights_of_several_replicas_overlap_where_the_kernels_do(tmp_path: Path) -> None:
    assert run_on_ranks(2, _own, write_checkpoint(tmp_path / "model")) == [[False, False, True, False]] * 2
