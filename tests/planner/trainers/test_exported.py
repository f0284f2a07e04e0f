"""An export: what can be said is written as it is, and what cannot has a clause and a price."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cost_models.protocol import CostModel
from meshwright.planner.job.algorithm_settings import PPO
from meshwright.planner.job.job import DEFAULT_SETTINGS, Facts, PPOJob, read_job
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import verify
from meshwright.planner.search.re_evaluate import re_evaluate
from meshwright.planner.solver.result import Limits
from meshwright.planner.trainers.exporter import export
from meshwright.planner.trainers.registry import TRAINERS
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.documents import parse
from meshwright.profiles.errors import BadInput
from tests.planner.drawn import model_of
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan
from tests.planner.trainers.configurations import configuration
from tests.planner.trainers.plans import NAMED, NAMES, best, facts_for
from tests.seeds import cases

JOB = Path(__file__).parents[3] / "examples/7b-8xa100-80gb/job.yaml"
SAMPLES = (
    "actor_rollout_ref.rollout.n",
    "rollout.n_samples_per_prompt",
    "n-samples-per-prompt",
    "grpo.num_generations_per_prompt",
    "generator.n_samples_per_prompt",
    "gconfig.n_samples",
)
BATCHES = (
    "data.train_batch_size",
    "rollout.batch_size",
    "rollout-batch-size",
    "grpo.num_prompts_per_step",
    "trainer.train_batch_size",
    "train_dataset.batch_size",
)
WRITTEN = [(name, algorithm) for name in NAMES for algorithm in TRAINERS[name].algorithms if algorithm != "ppo"]


def no_model(_facts: Facts) -> CostModel:
    raise AssertionError("nothing has to be searched")


@cases(
    ("name", "staleness"),
    [(name, staleness) for name in NAMES for staleness in (0, 1)],
    few=[("verl", 0), ("nemo-rl", 1), ("openrlhf", 0), ("slime", 0)],
)
def test_what_a_trainer_can_say_is_written_as_it_is(name: str, staleness: int) -> None:
    plan = best(name, staleness).plan
    found = export(TRAINERS[name], plan, no_model)
    assert found is not None
    assert found.plan == plan
    assert (found.inexpressible, found.lost_seconds) == ((), 0.0)
    assert parse(Plan, found.files["plan.json"], "plan") == plan


@cases("name", NAMES, few=["openrlhf", "slime"])
def test_what_it_cannot_say_is_listed_and_priced(name: str) -> None:
    facts = facts_for(name)
    plan = random_plan(3, facts, model_of(facts))
    found = export(TRAINERS[name], plan, model_of, limits=Limits(gap=0.3))
    assert found is not None
    assert found.inexpressible
    assert found.lost_seconds == found.plan.period_seconds - plan.period_seconds
    again = export(TRAINERS[name], found.plan, no_model)
    assert again is not None
    assert again.inexpressible == ()


@pytest.mark.parametrize("name", NAMED)
def test_every_key_has_an_origin_and_stands_once(name: str) -> None:
    found = export(TRAINERS[name], best(name).plan, no_model)
    assert found is not None
    told = json.loads(found.to_json())
    keys = [setting["key"] for setting in told["settings"]]
    assert len(set(keys)) == len(keys) > 30
    assert all(setting["origin"] for setting in told["settings"])
    assert told["trainer"] == TRAINERS[name].label


def test_a_job_that_it_cannot_hold_has_no_export() -> None:
    facts = small_facts(memory_bytes=2**10)
    plan = random_plan(0, facts, model_of(facts))
    assert export(TRAINERS["openrlhf"], plan, model_of) is None


@cases(("name", "algorithm"), WRITTEN, few=[("verl", "rloo"), ("nemo-rl", "grpo"), ("slime", "reinforce++")])
def test_a_plan_without_a_critic_is_written_without_one(name: str, algorithm: Algorithm) -> None:
    plan = best(name, algorithm=algorithm).plan
    found = export(TRAINERS[name], plan, no_model)
    assert found is not None
    assert found.plan == plan
    said = {setting.key: setting.value for setting in found.settings if setting.value is not False}
    assert not [key for key in said if "critic" in key]
    assert "megatron.yaml" not in found.files
    (samples,) = (said[key] for key in SAMPLES if key in said)
    (batch,) = (said[key] for key in BATCHES if key in said)
    assert (samples, batch) == (4, plan.facts.workload.num_prompts)


def test_an_algorithm_that_is_not_written_for_a_trainer_is_refused_by_name() -> None:
    plan = best("nemo-rl", algorithm="rloo").plan
    sentence = "algorithm=rloo is not written for nemo-rl, only ppo and grpo; run the plan here"
    with pytest.raises(BadInput, match=sentence):
        export(TRAINERS["nemo-rl"], plan, no_model)


@cases("name", NAMES, few=["verl", "nemo-rl"])
def test_a_plan_is_priced_with_what_the_trainer_generates_with(name: str) -> None:
    trainer, ours = TRAINERS[name], best(name).plan.facts.model_copy(update={"engine": "meshwright-eager"})
    plan = re_evaluate(best(name).plan, ours, model_of(ours))
    found = export(trainer, plan, model_of)
    assert found is not None
    assert found.plan.facts.engine == trainer.engine == json.loads(found.to_json())["engine"]
    assert found.plan.period_seconds > plan.period_seconds  # the host of an engine that serves has more to do
    assert found.lost_seconds == 0.0
    assert verify(found.plan) == ()


@pytest.mark.parametrize(
    ("name", "key", "none", "two"),
    [
        ("verl", "trainer.critic_warmup", 0, 3),
        ("slime", "num-critic-only-steps", 0, 2),
        ("openrlhf", "critic.freezing_steps", None, 2),
    ],
)
def test_steps_of_the_critic_alone_are_written_as_the_trainer_counts_them(
    monkeypatch: pytest.MonkeyPatch, name: str, key: str, none: int | None, two: int
) -> None:
    assert configuration(name).get(key) == none
    monkeypatch.setitem(DEFAULT_SETTINGS, "ppo", PPO(critic_warmup_steps=2))
    assert configuration(name)[key] == two


@pytest.mark.parametrize("name", ["verl", "nemo-rl"])
def test_a_setting_that_changes_nothing_in_what_is_written_is_named(name: str) -> None:
    job, plan = read_job(JOB), best(name, 0).plan
    assert isinstance(job, PPOJob)
    changed = job.model_copy(update={"ppo": PPO(actor_learning_rate=3e-6, reward_scale=2.0)})
    usual, scaled = (export(TRAINERS[name], plan, no_model, job=one, directory=JOB.parent) for one in (job, changed))
    assert usual is not None
    assert scaled is not None
    (added,) = set(scaled.remarks) - set(usual.remarks)
    assert added.startswith(f"ppo.reward_scale=2.0 is not written, because no key of {TRAINERS[name].label} for it")
