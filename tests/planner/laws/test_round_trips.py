"""Plans of the reference jobs that a trainer can express come back from its configuration with the same choices.

A job whose reward model the trainer has no place for is scored by a function.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.planner.job.job import Facts, read_job, resolve
from meshwright.planner.job.rewards_and_tools import Reward
from meshwright.planner.solver.result import Limits
from meshwright.planner.trainers.exporter import best_expressible_plan
from meshwright.planner.trainers.registry import READERS, TRAINERS
from meshwright.planner.trainers.trainer import ExportInput, OtherTrainer
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import Role
from tests.planner.drawn import model_of
from tests.planner.trainers.written import FILES, assert_is_read

EXAMPLES = Path(__file__).parents[3] / "examples"
JOBS = sorted(path.parent.name for path in EXAMPLES.glob("*/job.yaml") if path.parent.name != "tiny")
WITHOUT_CRITIC = ("30b-a3b-32xh100", "dsv3-512xh100", "grpo-30b-a3b-32xh100", "grpo-7b-8xh100")
WITH_CRITIC = (
    "10b-16xa100",
    "13b-70b-128",
    "405b-1024",
    "70b-64xh100",
    "7b-16xa100",
    "7b-8xa100-40gb",
    "7b-8xa100-80gb",
    "long-tail-64",
    "mixed-32",
    "moe-16384",
)
EXPRESSIBLE = {"skyrl": WITHOUT_CRITIC, "areal": (*WITHOUT_CRITIC, *WITH_CRITIC)}
NOT_SEARCHED = ("13b-70b-128", "405b-1024", "moe-16384", "mixed-32")
"""Jobs whose searches take many minutes, and one of two kinds of nodes that some stages cannot share."""


def facts_for(trainer: OtherTrainer, name: str) -> Facts:
    facts = resolve(read_job(EXAMPLES / name / "job.yaml"), EXAMPLES / name)
    if Role.REWARD in trainer.unsupported_roles and Role.REWARD in facts.graph.roles:
        models = facts.models.model_copy(update={"reward": None})
        scored = Reward(name="verifier", function="reward:score").load
        facts = facts.model_copy(update={"models": models, "rewards": (scored,)})
    return trainer.with_engine(facts)


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_every_other_reference_job_is_refused_with_the_name_of_the_trainer(name: str) -> None:
    for job in JOBS:
        facts = facts_for(TRAINERS[name], job)
        if job in EXPRESSIBLE[name]:
            TRAINERS[name].require_exportable(facts)
        else:
            with pytest.raises(BadInput, match=f"not written for {name}"):
                TRAINERS[name].require_exportable(facts)


@pytest.mark.check_all
@pytest.mark.parametrize(
    ("name", "job"), [(name, job) for name, jobs in EXPRESSIBLE.items() for job in jobs if job not in NOT_SEARCHED]
)
def test_what_is_written_for_a_reference_job_is_read_again(tmp_path: Path, name: str, job: str) -> None:
    trainer = TRAINERS[name]
    facts = facts_for(trainer, job)
    found = best_expressible_plan(trainer, facts, model_of(facts), limits=Limits(gap=0.1))
    assert found is not None
    source = ExportInput(plan=found.plan)
    for file, text in trainer.files(source, tuple(trainer.settings(source))).items():
        (tmp_path / file).write_text(text)
    configured = READERS[name].read(tmp_path / FILES[name])
    degrees = tuple(field for field in configured.fields if not field.what.endswith("micro_batch_tokens"))
    assert_is_read(found.plan, replace(configured, fields=degrees))
