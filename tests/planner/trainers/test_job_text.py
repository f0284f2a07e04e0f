"""The job of a configuration is one, and names models that are here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.planner.job.job import read_job, resolve
from meshwright.planner.trainers.importer import JobSource
from meshwright.planner.trainers.registry import READERS
from meshwright.profiles.errors import BadInput
from tests.planner.trainers.written import plan_of, written


def test_the_job_is_read_again_with_what_the_configuration_says(tmp_path: Path) -> None:
    plan = plan_of("verl", 1)
    path = written("verl", plan, tmp_path)
    configured = READERS["verl"].read(path)
    source = JobSource(path=path, trainer="verl", engine="vllm", device="h100-sxm")
    (tmp_path / "job.yaml").write_text(source.text(configured, tmp_path))
    job = read_job(tmp_path / "job.yaml")
    assert job == source.job(configured, tmp_path)
    facts = resolve(job, tmp_path)
    assert facts.workload.batch_size == plan.facts.workload.batch_size
    assert (facts.staleness, facts.engine) == (1, "vllm")
    assert facts.cluster.num_ranks == plan.facts.cluster.num_ranks
    assert job.settings.gae_lambda == 0.95


def test_a_model_that_is_not_here_is_asked_for(tmp_path: Path) -> None:
    path = written("verl", plan_of("verl", 0), tmp_path)
    configured = READERS["verl"].read(path)
    elsewhere = JobSource(path=tmp_path / "other" / "run.sh", trainer="verl", engine="vllm", device="h100-sxm")
    with pytest.raises(BadInput, match=r"the actor model models/actor .* is not here, and nothing is fetched"):
        elsewhere.text(configured, tmp_path)
    shapes = {"": tmp_path / "models/actor"}
    assert replace(elsewhere, shapes=shapes).job(configured, tmp_path).models.actor.path == "models/actor"
    without = replace(configured, fields=tuple(one for one in configured.fields if one.what != "models.reward"))
    with pytest.raises(BadInput, match=r"has no reward model, and a job has one; .* --model reward=PATH"):
        replace(elsewhere, shapes=shapes).text(without, tmp_path)


@pytest.mark.parametrize(("kl", "roles"), [("True", ["actor", "ref"]), ("False", ["actor"])])
def test_a_job_without_a_critic_has_the_roles_and_settings_of_its_algorithm(
    tmp_path: Path, kl: str, roles: list[str]
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 "
        f"actor_rollout_ref.actor.use_kl_loss={kl} actor_rollout_ref.actor.clip_ratio_high=0.28\n"
    )
    shapes = {"": tmp_path / "models/actor"}
    source = JobSource(path=path, trainer="verl", engine="vllm", device="h100-sxm", shapes=shapes)
    (tmp_path / "job.yaml").write_text(source.text(READERS["verl"].read(path), tmp_path))
    job = read_job(tmp_path / "job.yaml")
    assert job.algorithm == "grpo"
    assert [role.value for role in job.models.roles] == roles
    assert [reward.function for reward in job.rewards] == ["maths_answer"]
    assert (job.workload.batch_size, job.workload.group_size) == (8192, 8)
    assert job.settings.clip_range == (0.8, 1.28)
    assert job.settings.loss_mean == "token"


def test_shapes_of_a_model_that_the_job_has_not_are_refused(tmp_path: Path) -> None:
    path = written("verl", plan_of("verl", 0), tmp_path)
    configured, source = READERS["verl"].read(path), JobSource(path=path, trainer="verl", engine="vllm", device="l4")
    small = tmp_path / "small"
    with pytest.raises(
        BadInput, match=r"--model .*small: every model of configuration .* is here or given by its role"
    ):
        replace(source, shapes={"": small}).job(configured, tmp_path)
    assert replace(source, shapes={"actor": small}).job(configured, tmp_path).models.actor.path == "small"
    with pytest.raises(BadInput, match=r"--model teacher=.*: .* has no teacher model; its models are actor, critic"):
        replace(source, shapes={"teacher": small}).job(configured, tmp_path)
    path.write_text("python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8\n")
    paid = READERS["verl"].read(path)
    with pytest.raises(
        BadInput, match=r"--model reward=.* has no reward model, because a function scores; its models are a"
    ):
        replace(source, shapes={"": small, "reward": small}).job(paid, tmp_path)


def test_an_adapter_a_schedule_and_a_users_function_stand_in_the_job(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 "
        "actor_rollout_ref.model.lora_rank=16 actor_rollout_ref.model.lora_alpha=32 custom_reward_function.path=x.py "
        "actor_rollout_ref.actor.optim.lr_warmup_steps=5\n"
    )
    source = JobSource(path=path, trainer="verl", engine="vllm", device="h100-sxm", shapes={"": tmp_path / "m"})
    (tmp_path / "job.yaml").write_text(source.text(READERS["verl"].read(path), tmp_path))
    job = read_job(tmp_path / "job.yaml")
    assert job.models.actor.adapter is not None
    assert (job.models.actor.adapter.rank, job.models.actor.adapter.alpha) == (16, 32.0)
    assert job.settings.actor_schedule.warmup_steps == 5
    assert [reward.function for reward in job.rewards] == ["reward:score"]
