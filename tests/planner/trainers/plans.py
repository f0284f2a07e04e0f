"""Small jobs, and the best plans of them that a trainer can say."""

from __future__ import annotations

from functools import cache

import pytest

from meshwright.planner.job.job import Facts, RoleModels
from meshwright.planner.job.rewards_and_tools import Reward
from meshwright.planner.solver.result import Limits
from meshwright.planner.trainers.exporter import TrainerPlan, best_expressible_plan
from meshwright.planner.trainers.registry import TRAINERS
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.stages import Role
from tests.planner.drawn import model_of
from tests.planner.jobs import small_facts

NAMES = tuple(TRAINERS)
NAMED = [
    pytest.param(name, marks=[pytest.mark.check_all] if Role.REWARD in TRAINERS[name].unsupported_roles else [])
    for name in NAMES
]
"""All trainers; of those without a reward model the first tier has the tests of their own files alone."""


def facts_of(*, staleness: int = 0, ranks_per_node: int = 4, algorithm: Algorithm = "ppo") -> Facts:
    """Tiny models on a few ranks with two updates a step; without a critic in groups of four, in grpo no reference."""
    facts = small_facts(ranks_per_node=ranks_per_node, memory_bytes=2**34, num_minibatches=2)
    update: dict[str, object] = {"staleness": staleness}
    if algorithm != "ppo":
        ref = None if algorithm == "grpo" else facts.models.ref
        models = RoleModels(actor=facts.models.actor, ref=ref, reward=facts.models.reward)
        workload = facts.workload.model_copy(update={"group_size": 4})
        update |= {"algorithm": algorithm, "models": models, "workload": workload}
    return facts.model_copy(update=update)


def main_algorithm(name: str) -> Algorithm:
    """PPO, or RLOO with a reference for a trainer that has no reward model."""
    return "rloo" if Role.REWARD in TRAINERS[name].unsupported_roles else "ppo"


def facts_for(name: str, *, staleness: int = 0, algorithm: Algorithm | None = None) -> Facts:
    """Such a job for a trainer, with its engine; with a function where the trainer has no reward model."""
    trainer = TRAINERS[name]
    facts = trainer.with_engine(facts_of(staleness=staleness, algorithm=algorithm or main_algorithm(name)))
    if Role.REWARD not in trainer.unsupported_roles:
        return facts
    scored = Reward(name="verifier", function="reward:score").load
    models = facts.models.model_copy(update={"reward": None})
    return facts.model_copy(update={"models": models, "rewards": (scored,)})


@cache
def best(name: str, staleness: int = 0, algorithm: Algorithm | None = None) -> TrainerPlan:
    """The best plan of such a job that a trainer can say."""
    facts = facts_for(name, staleness=staleness, algorithm=algorithm)
    found = best_expressible_plan(TRAINERS[name], facts, model_of(facts), limits=Limits(gap=0.3))
    assert found is not None
    return found
