"""A student comes nearer to its teacher, on any ranks alike, and a run that was stopped goes on as if it was not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.durations import Planned
from meshwright.profiles.errors import BadInput
from meshwright.runtime.execution.rehearse import rehearse
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.train import run_plan
from meshwright.runtime.records.record import RunSummary
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.rewarded import lines, stopped_and_resumed
from tests.runtime.small_job import VOCAB_SIZE, request, write_job
from tests.seeds import cases

REWARDING = ("tests.runtime.rewarding",)
APART = ("actor_generate.pool=0:1", "teacher_logprob.pool=1:1", "actor_train.pool=0:2")


def write_distilled(directory: Path, *, num_ranks: int = 2, teachers: int = 1, **changes: Any) -> Path:
    """A job whose teachers have a layer more each than the student; `changes` are other keys of the job."""
    path = write_job(directory, num_ranks=num_ranks)
    job = yaml.safe_load(path.read_text())
    roles = ("teacher", "teacher_2")[:teachers]
    for seed, role in enumerate(roles, start=5):
        write_checkpoint(directory / role, vocab_size=VOCAB_SIZE, num_hidden_layers=seed, seed=seed)
    del job["ppo"]
    job["models"] = {role: {"path": role} for role in ("actor", *roles)}
    job |= {"algorithm": "distill", "distill": {"actor_learning_rate": 3e-3}, **changes}
    path.write_text(yaml.safe_dump(job))
    return path


def ran(asked: RunRequest) -> RunSummary:
    found = run_plan(asked)
    assert isinstance(found, RunSummary)
    return found


@pytest.mark.slow
@cases("teachers", [1, 2], few=1)
def test_the_divergence_to_the_teachers_falls(teachers: int, tmp_path: Path) -> None:
    found = ran(request(write_distilled(tmp_path, teachers=teachers), tmp_path / "run", steps=12))
    rise, error = found.improvement() or (0.0, 1.0)
    assert rise > 3 * error
    assert all(one.by_teachers and one.reported_score > 0 for one in found.evaluations)
    told = lines(tmp_path / "run")
    assert told[-1]["kl_to_teachers_per_token"] < told[0]["kl_to_teachers_per_token"]
    assert not [name for name in told[0] if "score" in name or "ref" in name or "critic" in name]


@pytest.mark.check_all
def test_where_the_teacher_runs_changes_nothing(tmp_path: Path) -> None:
    path = write_distilled(tmp_path)
    together, apart = (
        ran(request(path, tmp_path / "one", steps=3)),
        ran(request(path, tmp_path / "two", *APART, steps=3)),
    )
    for name in ("kl_to_teachers", "policy_loss", "actor_grad_norm"):
        values = [[line[name] for line in lines(tmp_path / out)] for out in ("one", "two")]
        assert values[0] == pytest.approx(values[1], abs=1e-4), name
    for one, other in zip(together.evaluations, apart.evaluations, strict=True):
        assert one.scores == pytest.approx(other.scores, abs=1e-4)


@pytest.mark.check_all
@pytest.mark.parametrize("has_distributions", [False, True])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(has_distributions: bool, tmp_path: Path) -> None:
    """Whole distributions lie beside rewards here, so that a checkpoint has both."""
    path = write_distilled(tmp_path, staleness=1)
    if has_distributions:
        job = yaml.safe_load(path.read_text())
        job["distill"] |= {"teacher_top_k": 4, "distillation_weight": 0.5}
        job["workload"]["group_size"] = 4
        job["rewards"] = [{"name": "short", "function": "tests.runtime.rewarding:is_short"}]
        path.write_text(yaml.safe_dump(job))
    asked = replace(request(path, tmp_path / "whole", "actor_generate.pool=0:1", steps=4), allowed_modules=REWARDING)
    whole, resumed = stopped_and_resumed(asked)
    added = ("score", "distillation_loss", "teacher_top_mass") if has_distributions else ()
    for one, other in zip(whole, resumed, strict=True):
        for name in ("kl_to_teachers", "policy_loss", "actor_grad_norm", "max_staleness", *added):
            assert one[name] == other[name], name


@pytest.mark.check_all
@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_the_divergence_falls_where_whole_distributions_are_learned(kind: str, tmp_path: Path) -> None:
    """In the same number of steps the rise is at least that of the estimate on sampled tokens."""
    told = []
    for name, more in (("sampled", {}), ("whole", {"teacher_top_k": 8, "divergence": kind})):
        (tmp_path / name).mkdir()
        path = write_distilled(tmp_path / name, distill={"actor_learning_rate": 3e-3, **more})
        told.append(ran(request(path, tmp_path / name / "run", steps=12)).improvement() or (0.0, 1.0))
    assert told[1][0] > 3 * told[1][1]
    assert told[1][0] > told[0][0] - told[0][1]


@pytest.mark.check_all
def test_rewards_rise_beside_a_teacher_and_are_what_is_evaluated(tmp_path: Path) -> None:
    path = write_distilled(tmp_path)
    job = yaml.safe_load(path.read_text())
    job["distill"] |= {"distillation_weight": 0.01}
    job["workload"]["group_size"] = 4
    job["rewards"] = [{"name": "short", "function": "tests.runtime.rewarding:is_short"}]
    path.write_text(yaml.safe_dump(job))
    found = ran(replace(request(path, tmp_path / "run", steps=12), allowed_modules=REWARDING))
    rise, error = found.improvement() or (0.0, 1.0)
    assert rise > 3 * error
    assert not any(one.by_teachers for one in found.evaluations)
    assert {"kl_to_teachers", "score", "paid_score", "groups_with_signal"} <= lines(tmp_path / "run")[0].keys()


@pytest.mark.check_all
def test_a_student_may_be_an_adapter(tmp_path: Path) -> None:
    path = write_distilled(tmp_path)
    job = yaml.safe_load(path.read_text())
    job["models"]["actor"]["adapter"] = {"rank": 4, "alpha": 8}
    job["distill"]["actor_learning_rate"] = 3e-2
    path.write_text(yaml.safe_dump(job))
    rise, error = ran(request(path, tmp_path / "run", steps=12)).improvement() or (0.0, 1.0)
    assert rise > 3 * error


@pytest.mark.check_all
@pytest.mark.parametrize("top_k", [None, 4])
def test_a_rehearsal_takes_the_time_of_the_plan(top_k: int | None, tmp_path: Path) -> None:
    settings = {"actor_learning_rate": 3e-3, **({"teacher_top_k": top_k} if top_k else {})}
    plan = request(write_distilled(tmp_path, distill=settings), tmp_path / "run").plan
    assert isinstance(plan, Plan)
    found = rehearse(plan, Planned(plan), steps=2, speed=2 / plan.period_seconds)
    assert found.steps.mean == pytest.approx(plan.period_seconds, rel=0.25)


@pytest.mark.check_all
def test_a_graph_of_the_job_s_own_learns_from_rewards_and_teachers_as_the_preset_does(tmp_path: Path) -> None:
    path, told = write_distilled(tmp_path), []
    job = yaml.safe_load(path.read_text())
    job["distill"] |= {"distillation_weight": 0.5}
    job["workload"]["group_size"] = 4
    job["rewards"] = [{"name": "short", "function": "tests.runtime.rewarding:is_short"}]
    path.write_text(yaml.safe_dump(job))
    preset = request(path, tmp_path / "preset", steps=2)
    stages = [
        {"name": stage.name, "role": stage.role.value, "reads": [*stage.reads], "writes": [*stage.writes]}
        for stage in preset.plan.graph.stages
    ]
    for stage, kind in zip(stages, ("generation", "inference", "inference", "training"), strict=True):
        stage["kind"] = kind
    assert stages[2]["name"] == "actor_logprob"
    stages[2]["name"] = "last_logprob"  # no preset has a stage of this name
    hosts = [
        {"name": host.name, "kind": "environment", "reads": [*host.reads], "writes": [*host.writes]}
        for host in preset.plan.graph.host_stages
    ]
    path.write_text(yaml.safe_dump(job | {"algorithm": {"stages": [stages[0], *hosts, *stages[1:]]}}))
    for asked in (preset, request(path, tmp_path / "own", steps=2)):
        ran(replace(asked, allowed_modules=REWARDING))
        told.append(lines(asked.out))
    for one, other in zip(*told, strict=True):
        for name in ("kl_to_teachers", "score", "policy_loss", "actor_grad_norm"):
            assert one[name] == pytest.approx(other[name], abs=1e-5), name


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"rewards": [{"name": "exact", "function": "exact_match"}]},
            r"workload\.group_size=1: algorithm=distill compares the rewards of a prompt's samples",
        ),
        ({"distill": {"teacher_top_k": 10**6}}, r"teacher_top_k=1000000 is more than the \d+ tokens of the vocabulary"),
        ({"distill": {"teacher_weights": [1, 2]}}, r"distill\.teacher_weights has 2 weights and models has 1 teachers"),
        ({"distill": {"reward_clip": 1.0}}, r"distill\.reward_clip=1\.0 concerns rewards, and the job has none"),
        ({"ppo": {"seed": 1}}, "unknown key 'ppo'; .* this job has its settings under distill; move them there"),
    ],
)
def test_a_job_that_pays_or_weighs_otherwise_is_refused(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=sentence):
        request(write_distilled(tmp_path, **change), tmp_path / "run")
