"""An update does not depend on how it is computed: layout, micro-batches, recomputation."""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.model.weights import load_weights
from meshwright.runtime.training.losses import LossShare
from meshwright.runtime.training.trainer import LossFunction, MicroBatch, Trainer, run_schedule
from tests.runtime.checkpoints import tokens, write_checkpoint
from tests.runtime.ranks import run_on_ranks
from tests.runtime.updates import (
    HEADS,
    LENGTH,
    ROWS,
    How,
    assert_updates_are_those_of_one_rank,
    blocks,
    language_loss,
)
from tests.seeds import cases

OTHERS = [
    How("tp1", 1),
    How("tp1", 2),
    How("tp1", 3),
    How("tp1", 4, "selective"),
    How("tp1", 4, "full"),
    How("dp2", 1),
    How("dp3", 1),  # two rows, one and one
    How("dp3", 2, "full"),
    How("dp4", 1),
    How("tp2", 2),
    How("tp2,sp", 2),
    How("tp2,sp", 2, "full"),
    How("pp2", 1),
    How("pp2", 3, "selective"),
    How("pp4", 1, "full"),
    How("tp2,dp2", 2),
    How("tp2,dp2,sp", 1),
    How("pp2,dp2", 1),
    How("tp2,pp2,sp", 2),
]
HALVES = [("Qwen2", False, OTHERS[::2]), ("Llama", True, OTHERS[1::2])]


@pytest.mark.slow
@cases(  # Qwen2 ties its embeddings, Qwen3 has norms by head
    ("family", "scalar", "hows"),
    [*HALVES, *((*model, OTHERS) for model in itertools.product(("Llama", "Qwen2", "Qwen3"), (False, True)))],
    few=HALVES,
)
def test_the_update_is_the_same_however_it_is_computed(
    tmp_path: Path, family: str, scalar: bool, hows: list[How]
) -> None:
    directory = write_checkpoint(tmp_path / "model", family, head=HEADS[scalar])
    assert_updates_are_those_of_one_rank(directory, hows, tmp_path, scalar=scalar)


def _one_replica_idle(directory: Path, layout: str) -> list[float] | None:
    """Loss and gradient norm of an update for which only the first replica has rows."""
    mesh = build_mesh(Layout.parse(layout), 0)
    if not mesh.is_member:
        return None
    spec = read_model(directory)
    model = build_model(spec, mesh, trainable=True)
    load_weights(model, spec, mesh, directory)
    rows = MicroBatch.pack(tokens(ROWS, LENGTH), {"mask": torch.ones(ROWS, LENGTH)})
    metrics = Trainer(model, mesh, learning_rate=1e-3).train_step(
        [rows] if mesh.dp_rank == 0 else [], functools.partial(language_loss, spec, mesh)
    )
    return [metrics["loss"], metrics["grad_norm"]]


@pytest.mark.slow
def test_a_replica_without_rows_takes_part(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    alone, *_ = run_on_ranks(4, _one_replica_idle, directory, "tp1")
    for seen in run_on_ranks(4, _one_replica_idle, directory, "pp2,dp2"):
        assert seen == pytest.approx(alone, rel=1e-5)


def _after_bad_updates(directory: Path) -> tuple[list[float], bool] | None:
    """The gradient norms of bad updates, and whether the good one behind them is what it is without them.

    One replica alone has numbers that are not finite, and they show in the gradient alone or in the metrics too.
    """
    mesh = build_mesh(Layout(dp=2, pp=2), 0)
    spec = read_model(directory)

    def broken(value: float, shown: float) -> LossFunction:
        factor = value if mesh.dp_rank == 1 else 1.0
        metrics = {"loss": torch.tensor(shown if mesh.dp_rank == 1 else 0.0)}
        return lambda output, _: LossShare(output[..., 0].sum() * factor, metrics)

    norms, weights = [], []
    for losses in ([broken(math.nan, 0.0), broken(math.inf, 0.0), broken(1.0, math.nan)], []):
        model = build_model(spec, mesh, trainable=True)
        load_weights(model, spec, mesh, directory)
        trainer = Trainer(model, mesh, learning_rate=1e-3)
        norms += [trainer.train_step(blocks(2, mesh), loss)["grad_norm"] for loss in losses]
        trainer.train_step(blocks(2, mesh), functools.partial(language_loss, spec, mesh))
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    return norms, all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.slow
def test_an_update_with_a_number_that_is_not_finite_is_done_on_no_rank_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    for norms, spared in run_on_ranks(4, _after_bad_updates, write_checkpoint(tmp_path / "model")):
        assert [math.isfinite(norm) for norm in norms] == [False, False, True]
        assert spared


def test_rows_of_one_rank_are_whole() -> None:
    assert run_on_ranks(4, _is_itself) == [True] * 4


def _is_itself() -> bool:
    block = MicroBatch.pack([torch.arange(3), torch.arange(2)])
    return block.shard(build_mesh(Layout(dp=4), 0)) is block


def test_what_a_forward_pass_says_of_a_micro_batch_is_gone_before_it_says_more(tmp_path: Path) -> None:
    held, whole = run_on_ranks(1, _held_of_logits, write_checkpoint(tmp_path / "model"))[0]
    assert whole > 0
    assert held == [0, 0, 0]


@torch.no_grad()
def _held_of_logits(directory: Path) -> tuple[list[int], int]:
    """Bytes of each micro-batch's logits behind a pass over three, and those of one."""
    spec, mesh = read_model(directory), build_mesh(Layout(), 0)
    model, logits, sizes = build_model(spec, mesh), list[Tensor](), list[int]()

    def output(result: Tensor, _: MicroBatch) -> None:
        assert not any(one.untyped_storage().nbytes() for one in logits)
        logits.append(result)
        sizes.append(result.untyped_storage().nbytes())

    run_schedule([model], mesh, [MicroBatch.pack([torch.arange(5)])] * 3, output, forward_only=True)
    return [one.untyped_storage().nbytes() for one in logits], sizes[0]
