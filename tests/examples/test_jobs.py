"""Every reference job can be planned from: its models are read, its devices and networks are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.planner.job.job import Facts, read_job, resolve
from meshwright.planner.plan.layout_and_schedule_rules import workload_violations

EXAMPLES = Path(__file__).parents[2] / "examples"
JOBS = {
    "10b-16xa100": (16, (9.98, 9.85)),
    "13b-70b-128": (128, (13.02, 68.71)),
    "30b-a3b-32xh100": (32, (30.53, 0.494)),
    "405b-1024": (1024, (405.9, 69.50)),
    "70b-64xh100": (64, (68.98, 6.61)),
    "7b-16xa100": (16, (6.74, 6.61)),
    "7b-8xa100-40gb": (8, (6.74, 6.61)),
    "7b-8xa100-80gb": (8, (6.74, 6.61)),
    "agents-397b-256": (256, (390.85, None)),
    "distill-8b": (8, (8.19, None)),
    "dsv3-512xh100": (512, (671.03, None)),
    "grpo-30b-a3b-32xh100": (32, (30.53, None)),
    "grpo-7b-8xh100": (8, (7.62, 7.07)),
    "grpo-judge-8xh100": (8, (7.62, None)),
    "grpo-lora-7b-4xh100": (4, (7.62, 7.07)),
    "long-tail-64": (64, (6.74, 6.61)),
    "mixed-32": (32, (6.74, 6.61)),
    "moe-16384": (16384, (235.09, 31.98)),
    "own-graph-16xh100": (16, (8.19, None)),
}
"""Ranks, and billions of parameters of actor and reward model as their publishers count them (with a scalar head); None
where there is none."""

MADE_LOCALLY = "tiny"


def facts_of(name: str) -> Facts:
    path = EXAMPLES / name / "job.yaml"
    return resolve(read_job(path), path.parent)


def test_every_example_is_listed_here() -> None:
    assert {path.parent.name for path in EXAMPLES.glob("*/job.yaml")} == {*JOBS, MADE_LOCALLY}


@pytest.mark.parametrize("name", JOBS)
def test_a_reference_job_resolves_to_its_ranks_and_sizes(name: str) -> None:
    facts = facts_of(name)
    num_ranks, (actor, reward) = JOBS[name]
    assert facts.cluster.num_ranks == num_ranks
    assert facts.models.actor.num_params / 1e9 == pytest.approx(actor, rel=2e-3)
    size = facts.models.reward and facts.models.reward.num_params / 1e9
    assert size == (reward and pytest.approx(reward, rel=2e-3))
    base = replace(facts.models.actor, adapter=None)
    needs_ref = not facts.workload.turns and isinstance(facts.algorithm, str) and facts.algorithm != "distill"
    assert facts.models.ref in (base, base if needs_ref else None)
    if isinstance(facts.algorithm, str):
        assert facts.models.critic in ((facts.models.reward,) if facts.algorithm == "ppo" else (None,))
    assert workload_violations(facts) == ()


def test_the_teacher_is_as_large_as_its_publisher_counts_it_and_reads_the_students_tokens() -> None:
    models = facts_of("distill-8b").models
    assert models.teacher
    assert models.teacher.num_params / 1e9 == pytest.approx(32.76, rel=2e-3)
    assert models.teacher.vocab_size == models.actor.vocab_size
