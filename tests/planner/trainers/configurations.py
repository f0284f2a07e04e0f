"""The settings of plans that a trainer can say, as mappings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from meshwright.planner.job.job import Facts
from meshwright.planner.plan.plan import Plan
from meshwright.planner.solver.result import Limits
from meshwright.planner.trainers.deployment_modes import DeploymentMode
from meshwright.planner.trainers.exporter import best_expressible_plan
from meshwright.planner.trainers.registry import TRAINERS
from meshwright.planner.trainers.trainer import ConfigValue, ExportInput, OtherTrainer
from meshwright.profiles.algorithms import Algorithm
from tests.planner.drawn import model_of
from tests.planner.trainers.plans import best, facts_for


def configuration(name: str, plan: Plan | None = None) -> dict[str, ConfigValue]:
    """Of a plan, by default the best one of a synchronous job; every key is one that the trainer knows."""
    trainer, origin = TRAINERS[name], ExportInput(plan=plan or best(name).plan)
    settings = list(trainer.settings(origin))
    assert [one.key for one in settings if not trainer.knows(one.key)] == []
    return {one.key: one.value for one in settings}


@cache
def plan_ahead(name: str, algorithm: Algorithm | None = None) -> Plan:
    """The best plan in which generation works a step ahead of the training."""
    facts = facts_for(name, staleness=1, algorithm=algorithm)
    found = best_expressible_plan(_ahead(TRAINERS[name]), facts, model_of(facts), limits=Limits(gap=0.3))
    assert found is not None
    return found.plan


def _ahead(trainer: OtherTrainer) -> OtherTrainer:
    def ways(facts: Facts) -> Iterator[DeploymentMode]:
        return (way for way in trainer.modes(facts) if way.steps_ahead)

    return replace(trainer, modes=ways)
