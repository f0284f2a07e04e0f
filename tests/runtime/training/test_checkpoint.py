"""A trainer that is saved and loaded, in another layout or on other ranks, goes on as if it had not been."""

from __future__ import annotations

import functools
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from meshwright.profiles.errors import BadInput, RunFailed
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.launch.launch import ProcessSetup, launch
from meshwright.runtime.model.kernel_choice import PLAIN, ChosenKernels
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.model.weights import load_weights
from meshwright.runtime.training.checkpoint import load_trainers, publish, take_snapshot
from meshwright.runtime.training.trainer import Trainer
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.ranks import run_on_ranks
from tests.runtime.updates import blocks, language_loss, value_loss
from tests.seeds import cases

Places = dict[str, tuple[str, int]]  # layout and first rank of each trainer
Norms = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Some updates, from the models' first weights or from `read`, saved to `written` if it is given."""

    places: Places
    num_updates: int
    dtype: torch.dtype = torch.float32
    read: Path | None = None
    written: Path | None = None
    kernels: ChosenKernels = PLAIN


def _updates(models: Path, run: Run) -> Norms:
    """Loss and gradient norm of every update of the trainers that this rank holds."""
    trainers, meshes = {}, {}
    for name, (layout, first_rank) in run.places.items():
        mesh = build_mesh(Layout.parse(layout), first_rank)
        if mesh.is_member:
            spec = read_model(models / name)
            model = build_model(spec, mesh, dtype=run.dtype, trainable=True, kernels=run.kernels)
            if run.read is None:
                load_weights(model, spec, mesh, models / name)
            trainers[name] = Trainer(model, mesh, learning_rate=1e-2, weight_decay=0.1)
            meshes[name] = mesh
    if run.read is not None:
        load_trainers(run.read, trainers)
    seen: Norms = {name: [] for name in trainers}
    for name, trainer in trainers.items():
        loss = functools.partial(
            value_loss if trainer.model.spec.scalar_head else language_loss, trainer.model.spec, meshes[name]
        )
        for _ in range(run.num_updates):
            metrics = trainer.train_step(blocks(2, meshes[name]), loss)
            seen[name] += [metrics["loss"], metrics["grad_norm"]]
    if run.written is not None:
        publish(take_snapshot(run.written, trainers))
    return seen


FIRST: Places = {"actor": ("tp2,sp", 0), "critic": ("dp2", 2)}
ELSEWHERE: Places = {"actor": ("pp2", 2), "critic": ("tp1", 0)}


@pytest.mark.slow
@cases("dtype", [torch.float32, torch.bfloat16], few=1)
@cases("then", [ELSEWHERE, FIRST, {"actor": ("tp2,pp2", 0), "critic": ("tp2,dp2", 0)}], few=1)
def test_a_loaded_trainer_goes_on_where_it_was(tmp_path: Path, then: Places, dtype: torch.dtype) -> None:
    write_checkpoint(tmp_path / "actor", "Qwen2")
    write_checkpoint(tmp_path / "critic", head="ForSequenceClassification")
    saved = tmp_path / "saved"
    whole = _merge(tmp_path, Run(places=FIRST, num_updates=5, dtype=dtype))
    start = _merge(tmp_path, Run(places=FIRST, num_updates=2, dtype=dtype, written=saved))
    rest = _merge(tmp_path, Run(places=then, num_updates=3, dtype=dtype, read=saved))
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    for name in FIRST:
        assert start[name] + rest[name] == pytest.approx(whole[name], rel=tolerance), name


def _merge(models: Path, run: Run) -> Norms:
    return {name: values for seen in run_on_ranks(4, _updates, models, run) for name, values in seen.items()}


@pytest.mark.slow
def test_a_trainer_is_saved_before_its_first_update(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "actor")
    places: Places = {"actor": ("dp2", 0)}
    _merge(tmp_path, Run(places=places, num_updates=0, written=tmp_path / "saved"))
    again = _merge(tmp_path, Run(places=places, num_updates=1, read=tmp_path / "saved"))
    known = _merge(tmp_path, Run(places=places, num_updates=1))
    assert again["actor"] == pytest.approx(known["actor"], rel=1e-5)
    assert not (tmp_path / "saved.partial").exists()


@pytest.mark.slow
def test_a_trainer_that_computes_with_fused_operators_is_saved_for_one_that_does_not(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "actor")
    places: Places = {"actor": ("tp2", 0)}
    fused = Run(places=places, num_updates=0, written=tmp_path / "saved", kernels=ChosenKernels(operators="fused"))
    _merge(tmp_path, fused)
    again = _merge(tmp_path, Run(places=places, num_updates=1, read=tmp_path / "saved"))
    assert again["actor"] == pytest.approx(_merge(tmp_path, Run(places=places, num_updates=1))["actor"], rel=1e-5)


def _continued_otherwise(models: Path, saved: Path) -> tuple[list[dict[str, object]], float]:
    """The settings of a trainer that was loaded with others than it was saved with, and how far an update moves it."""
    spec, mesh = read_model(models / "actor"), build_mesh(Layout(dp=2), 0)
    model = build_model(spec, mesh, trainable=True)
    trainer = Trainer(model, mesh, learning_rate=1e-5, weight_decay=0.5, betas=(0.5, 0.6), epsilon=1e-6)
    load_trainers(saved, {"actor": trainer})
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer.train_step(blocks(2, mesh), functools.partial(language_loss, spec, mesh))
    moved = max(float((p.detach() - b).abs().max()) for p, b in zip(model.parameters(), before, strict=True))
    names = ("lr", "weight_decay", "betas", "eps")
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return [{name: group[name] for name in names} for group in groups], moved


@pytest.mark.slow
def test_learning_rate_weight_decay_and_betas_are_those_of_the_trainer_that_is_loaded(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "actor")
    _merge(tmp_path, Run(places={"actor": ("dp2", 0)}, num_updates=2, written=tmp_path / "saved"))
    for groups, moved in run_on_ranks(2, _continued_otherwise, tmp_path, tmp_path / "saved"):
        decayed, spared = groups
        assert decayed == {"lr": 1e-5, "weight_decay": 0.5, "betas": (0.5, 0.6), "eps": 1e-6}
        assert spared == {**decayed, "weight_decay": 0.0}
        assert 0 < moved < 1e-4  # at the rate it was saved with it moves by 1e-2


def _left_by_a_save(models: Path, run: Run) -> list[str]:
    """The processes that a save has started and not ended, but for the one of Python that counts semaphores."""
    _updates(models, run)
    commands = (" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True))
    return [command for command in commands if "resource_tracker" not in command]


@pytest.mark.slow
def test_a_save_leaves_no_process_behind(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "actor")
    run = Run(places={"actor": ("dp2", 0)}, num_updates=0, written=tmp_path / "saved")
    assert run_on_ranks(4, _left_by_a_save, tmp_path, run) == [[]] * 4


def _complaint(directory: Path) -> str:
    try:
        load_trainers(directory, {})
    except BadInput as error:
        return str(error)
    return "nothing was said"


def test_what_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    assert "there is no checkpoint" in run_on_ranks(1, _complaint, tmp_path / "missing")[0]
    (tmp_path / "empty").mkdir()
    assert "cannot be read" in run_on_ranks(1, _complaint, tmp_path / "empty")[0]


def _loads_until_one_is_killed(saved: Path) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    load_trainers(saved, {})


@pytest.mark.slow
def test_a_rank_that_is_killed_while_a_checkpoint_is_read_is_no_fault_of_the_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "actor")
    saved = tmp_path / "saved"
    _merge(tmp_path, Run(places={"actor": ("dp2", 0)}, num_updates=0, written=saved))
    with pytest.raises(RunFailed, match=r"SIGKILL|rank 0 failed: RuntimeError"):
        launch(
            _loads_until_one_is_killed,
            saved,
            num_ranks=2,
            setup=ProcessSetup("cpu"),
            preload="meshwright.runtime.execution.train",
        )
