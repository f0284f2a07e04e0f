"""What an export is made of: paths lead to the models from everywhere, and settings are the job's."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.job.algorithm_settings import PPO
from meshwright.planner.job.job import read_job
from meshwright.planner.job.rewards_and_tools import Reward
from meshwright.planner.trainers.registry import TRAINERS
from meshwright.planner.trainers.trainer import ExportInput
from meshwright.profiles.environment.turns import ToolTurns
from meshwright.profiles.errors import BadInput
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.stages import Role
from tests.planner.jobs import adapted_facts, distill_facts, quantised_facts
from tests.planner.plans import random_plan

JOB = Path(__file__).parents[3] / "examples/7b-8xa100-80gb/job.yaml"


def test_paths_are_those_of_the_job_or_names() -> None:
    plan = random_plan(0)
    given = ExportInput(plan=plan, job=read_job(JOB), directory=JOB.parent)
    assert Path(given.path(Role.ACTOR)).is_dir()
    assert Path(given.path(Role.ACTOR)).is_absolute()
    alone = ExportInput(plan=plan)
    assert alone.path(Role.CRITIC) == "models/critic"
    assert alone.settings == PPO()


def test_a_trainer_is_told_with_the_version_that_is_known() -> None:
    assert TRAINERS["verl"].label == "verl 0.9.1"
    assert [trainer.name for trainer in TRAINERS.values()] == list(TRAINERS)


def test_rewards_on_hosts_are_not_written_for_any_trainer() -> None:
    facts = random_plan(0).facts
    scored = facts.model_copy(update={"rewards": (Reward(name="exact", function="exact_match").load,)})
    for trainer in TRAINERS.values():
        with pytest.raises(BadInput, match=rf"several rewards together \(exact\) are not written for {trainer.name}"):
            trainer.require_exportable(scored)


def test_a_trainer_takes_a_job_whose_models_it_has_a_place_for_and_says_which_it_has_not() -> None:
    facts = random_plan(0).facts
    for trainer in TRAINERS.values():
        if not trainer.unsupported_roles:
            trainer.require_expressible(facts)
    sentence = (
        "models.critic is not written for skyrl: with Megatron it trains no critic; plan and run the job here, or "
        "choose another trainer"
    )
    with pytest.raises(BadInput, match=sentence):
        TRAINERS["skyrl"].require_expressible(facts)


def test_a_trainer_generates_with_its_engine_or_with_another_that_it_has_and_the_job_names() -> None:
    facts = random_plan(0).facts
    served = facts.model_copy(update={"engine": "sglang"})
    found = {name: (t.with_engine(facts).engine, t.with_engine(served).engine) for name, t in TRAINERS.items()}
    assert found == {
        "verl": ("vllm", "sglang"),
        "nemo-rl": ("vllm", "vllm"),
        "openrlhf": ("vllm", "vllm"),
        "slime": ("sglang", "sglang"),
        "skyrl": ("vllm", "vllm"),
        "areal": ("sglang", "sglang"),
    }


def test_rollouts_of_several_turns_are_not_written_for_any_trainer() -> None:
    facts = random_plan(0).facts
    turns = ToolTurns(number=LengthSpec(max=30, fixed=3), result=LengthSpec(max=8, fixed=2), max_tokens=64)
    told = facts.model_copy(update={"workload": facts.workload.model_copy(update={"turns": turns})})
    for trainer in TRAINERS.values():
        with pytest.raises(BadInput, match=rf"up to 30 turns with a tool .* are not written for {trainer.name}"):
            trainer.require_exportable(told)


def test_sampling_masks_are_not_written_for_any_trainer() -> None:
    facts = random_plan(0).facts
    keeping = facts.model_copy(update={"workload": facts.workload.model_copy(update={"kept_tokens": 64})})
    for trainer in TRAINERS.values():
        sentence = (
            rf"sampling mask of up to 64 tokens a position \(workload.kept_tokens\) is not written for {trainer.name}"
        )
        with pytest.raises(BadInput, match=sentence):
            trainer.require_exportable(keeping)


def test_a_distillation_is_not_written_for_any_trainer() -> None:
    facts = distill_facts(2)
    for trainer in TRAINERS.values():
        sentence = rf"from teachers \(teacher, teacher_2\) is not written for {trainer.name}; plan and run the job"
        with pytest.raises(BadInput, match=sentence):
            trainer.require_expressible(facts)


def test_an_adapter_is_not_written_for_any_trainer() -> None:
    facts = adapted_facts()
    for trainer in TRAINERS.values():
        with pytest.raises(
            BadInput, match=f"adapter of rank 4 is not written for {trainer.name}; plan and run the job"
        ):
            trainer.require_exportable(facts)


def test_8_bit_floats_are_written_for_verl_alone() -> None:
    facts = quantised_facts()
    TRAINERS["verl"].require_exportable(facts)
    for name in ("nemo-rl", "openrlhf", "slime", "skyrl", "areal"):
        with pytest.raises(BadInput, match=f"generation_weights=fp8 is not written for {name}; plan and run the job"):
            TRAINERS[name].require_expressible(facts)
