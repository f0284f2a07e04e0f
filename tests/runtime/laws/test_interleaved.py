"""Pipelines that pass every rank several times train, move and keep what one rank does."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.model.weights import load_weights, save_weights
from meshwright.runtime.training.refit import RefitCopy
from meshwright.runtime.training.trainer import Trainer
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.ranks import run_on_ranks
from tests.runtime.training.test_checkpoint import Places, Run, _merge
from tests.runtime.updates import (
    HEADS,
    How,
    assert_moved,
    assert_updates_are_those_of_one_rank,
    blocks,
    language_loss,
    written,
)
from tests.seeds import cases

pytestmark = pytest.mark.slow

HOWS = [
    How("pp2,vpp2", 1),
    How("tp2,pp2,vpp2,sp", 2, "full"),
    How("pp2,dp2,vpp2", 1, "selective"),
    How("pp4,vpp2", 1),
    How("pp2,cp2,vpp2", 1),
]
"""Two and four micro-batches of rows of different lengths to each replica and update."""


@cases(("family", "scalar"), [("Qwen2", False), ("Llama", True)], few=1)
def test_an_interleaved_pipeline_has_the_losses_and_the_weights_of_one_rank(
    tmp_path: Path, family: str, scalar: bool
) -> None:
    directory = write_checkpoint(tmp_path / "model", family, head=HEADS[scalar], num_hidden_layers=8)
    assert_updates_are_those_of_one_rank(directory, HOWS, tmp_path, scalar=scalar)


def _train_and_refit(directory: Path, source: str, target: str, written: Path) -> None:
    """Trains under one layout and moves the weights to a copy of another, on the last ranks; writes both."""
    source_mesh = build_mesh(Layout.parse(source), 0)
    target_mesh = build_mesh(Layout.parse(target), 4 - Layout.parse(target).num_ranks)
    spec = read_model(directory)
    trained = refitted = None
    if source_mesh.is_member:
        trained = build_model(spec, source_mesh, trainable=True)
        load_weights(trained, spec, source_mesh, directory)
        trainer = Trainer(trained, source_mesh, learning_rate=1e-2)
        trainer.train_step(blocks(1, source_mesh), functools.partial(language_loss, spec, source_mesh))
    if target_mesh.is_member:
        refitted = build_model(spec, target_mesh, seed=7)
    RefitCopy(trained, source_mesh, refitted, target_mesh).run()
    for name, model, mesh in (("source", trained, source_mesh), ("target", refitted, target_mesh)):
        if model is not None:
            save_weights(model, spec, mesh, written / name, config_from=directory)


@cases(
    ("source", "target"),
    [("pp2,vpp2", "tp2"), ("pp2,vpp2", "pp2,dp2"), ("pp2,dp2,vpp2", "pp4"), ("dp2", "pp2,vpp2")],
    few=1,
)
def test_weights_move_between_interleaved_and_other_pipelines(tmp_path: Path, source: str, target: str) -> None:
    directory = write_checkpoint(tmp_path / "model", "Qwen2")
    run_on_ranks(4, _train_and_refit, directory, source, target, tmp_path)
    trained, moved, first = (written(tmp_path / name) for name in ("source", "target", "model"))
    assert trained.keys() == moved.keys() == first.keys()
    assert all(torch.equal(trained[name], moved[name]) for name in trained)
    assert_moved(trained, first)


@cases(("first", "then"), [("pp2,vpp2", "tp2"), ("pp2", "pp2,vpp2"), ("tp2,pp2,vpp2,sp", "pp2,vpp2")], few=1)
def test_a_saved_trainer_goes_on_with_another_number_of_chunks(tmp_path: Path, first: str, then: str) -> None:
    write_checkpoint(tmp_path / "actor", "Qwen2")
    before: Places = {"actor": (first, 0)}
    after: Places = {"actor": (then, 1 if Layout.parse(then).num_ranks < 4 else 0)}
    whole = _merge(tmp_path, Run(places=before, num_updates=3))
    start = _merge(tmp_path, Run(places=before, num_updates=1, written=tmp_path / "saved"))
    rest = _merge(tmp_path, Run(places=after, num_updates=2, read=tmp_path / "saved"))
    assert start["actor"] + rest["actor"] == pytest.approx(whole["actor"], rel=1e-4)
