"""The settings of an optimizer: schedules, what a checkpoint brings back, and updates that are not done."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from meshwright.planner.job.algorithm_settings import LearningRateSchedule
from meshwright.planner.job.job import read_job, resolve
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.model.weights import load_weights
from meshwright.runtime.training.checkpoint import load_trainers, publish, take_snapshot
from meshwright.runtime.training.trainer import Trainer
from tests.runtime.carried_out import carried_out
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.plans_by_hand import Where, plan_by_hand
from tests.runtime.ranks import run_on_ranks
from tests.runtime.small_job import OF_TIME, write_job
from tests.runtime.updates import blocks, language_loss


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_schedules_are_megatrons_with_a_warm_up_that_does_not_begin_at_nothing(
    decay: Literal["constant", "linear", "cosine"],
) -> None:
    ends = {} if decay == "constant" else {"decay_steps": 13, "min_ratio": 0.1}
    ours = LearningRateSchedule.model_validate({"warmup_steps": 4, "decay": decay, **ends})
    theirs = OptimizerParamScheduler(
        torch.optim.AdamW([torch.zeros(1)]),
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.1,
        lr_warmup_steps=4,
        lr_decay_steps=13,
        lr_decay_style=decay,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    for step in range(20):
        theirs.num_steps = step + 1 if step < 4 else step
        assert ours.ratio(step) == pytest.approx(theirs.get_lr({}))


def _follow_settings(directory: Path, saved: Path) -> dict[str, Any]:
    mesh = build_mesh(Layout.parse("tp2,dp2"), 0)
    spec = read_model(directory)
    model = build_model(spec, mesh, trainable=True)
    load_weights(model, spec, mesh, directory)
    loss = functools.partial(language_loss, spec, mesh)
    first = Trainer(model, mesh, learning_rate=1e-3, weight_decay=0.1)
    first.train_step(blocks(2, mesh), loss)
    publish(take_snapshot(saved, {"actor": first}))
    model = build_model(spec, mesh, trainable=True)
    trainer = Trainer(model, mesh, learning_rate=1.0, weight_decay=0.3, betas=(0.8, 0.7), epsilon=1e-5)
    load_trainers(saved, {"actor": trainer})

    def moved(**how: Any) -> tuple[bool, dict[str, float]]:
        before = [parameter.detach().clone() for parameter in model.parameters()]
        metrics = trainer.train_step(blocks(2, mesh), loss, **how)
        return any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), metrics

    trainer.set_learning_rate(0.0)
    loaded = moved()[0]
    trainer.set_learning_rate(0.25)
    names = ("lr", "betas", "eps", "weight_decay")
    groups = [tuple(group[name] for name in names) for group in trainer.optimizers[0].param_groups]
    refused, metrics = moved(condition=lambda found: found["loss"] < 0)
    done, same_metrics = moved(condition=lambda found: found["loss"] > 0)
    return {
        "loaded": loaded,
        "groups": groups,
        "refused": (refused, metrics),
        "done": (done, same_metrics),
    }


@pytest.mark.slow
def test_what_a_trainer_is_made_with_wins_over_a_checkpoint_and_an_update_may_be_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    found = run_on_ranks(4, _follow_settings, directory, tmp_path / "saved")
    for of_rank in found:
        assert not of_rank["loaded"]  # at a learning rate of nothing
        assert of_rank["groups"] == [(0.25, (0.8, 0.7), 1e-5, 0.3), (0.25, (0.8, 0.7), 1e-5, 0.0)]
        refused, done = of_rank["refused"], of_rank["done"]
        assert (refused[0], done[0]) == (False, True)
        assert refused[1] == done[1] == found[0]["done"][1]


SETTINGS = {
    "target_kl": 1e-7,
    "reward_scale": 0.5,
    "reward_clip": 0.1,
    "adam_beta2": 0.99,
    "adam_eps": 1e-6,
    "actor_schedule": {"warmup_steps": 2},
    "critic_schedule": {"decay": "linear", "decay_steps": 4},
}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _run_all(requests: list[RunRequest]) -> None:
    for asked in requests:
        carried_out(asked)


@pytest.mark.slow
def test_settings_of_the_updates_mean_the_same_in_every_layout(tmp_path: Path) -> None:
    path = write_job(tmp_path, num_ranks=4, **SETTINGS)
    job = read_job(path)
    facts = resolve(job, tmp_path)
    wheres = {
        "one": {"other": Where("0:1")},
        "four": {"other": Where("0:4", "tp2,dp2"), "actor_train": Where("0:4", "pp2,dp2")},
    }
    requests = [
        RunRequest(plan=plan_by_hand(facts, where), job=job, directory=tmp_path, out=tmp_path / name, steps=2)
        for name, where in wheres.items()
    ]
    for asked in requests:
        asked.out.mkdir()
    run_on_ranks(4, _run_all, requests, timeout=300)
    one, four = (_lines(asked.out / "metrics.jsonl") for asked in requests)
    for line, also_line in zip(one, four, strict=True):
        for name in line.keys() - OF_TIME:
            assert also_line[name] == pytest.approx(line[name], abs=1e-4), name
    # Of two updates, the second finds the policy too far from where it was.
    assert all(line[f"{role}_grad_norm"] > 0 for role in ("actor", "critic") for line in one)
    assert [line["skipped_updates"] for line in one] == [1, 1]
    assert [line["actor_learning_rate"] for line in one] == pytest.approx([1.5e-4, 3e-4])
    assert [line["critic_learning_rate"] for line in one] == pytest.approx([3e-4, 2.25e-4])
    assert all(abs(line["paid_score"]) <= 0.1 for line in one)
