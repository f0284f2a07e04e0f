"""The best plan of a trainer: it is one that the trainer can say, valid, and no better than the best of all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.planner.compile import best_plan
from meshwright.planner.job.job import read_job, resolve
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import verify
from meshwright.planner.solver.result import Limits
from meshwright.planner.trainers.exporter import best_expressible_plan
from meshwright.planner.trainers.registry import TRAINERS
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.stages import GENERATE
from tests.planner.drawn import model_of
from tests.planner.jobs import small_facts
from tests.planner.trainers.plans import NAMES, best, facts_for
from tests.seeds import cases


@cases(
    ("name", "staleness", "algorithm"),
    [(name, staleness, algorithm) for name in NAMES for staleness in (0, 1) for algorithm in (None, "grpo")],
    few=[("verl", 1, None), ("nemo-rl", 0, "grpo"), ("openrlhf", 1, "grpo"), ("slime", 0, None)],
)
def test_the_plan_is_valid_keeps_its_way_and_has_a_bound(
    name: str, staleness: int, algorithm: Algorithm | None
) -> None:
    found = best(name, staleness, algorithm)
    assert verify(found.plan) == ()
    assert list(found.mode.inexpressible(found.plan)) == []
    assert found.plan.solver.bound_seconds <= found.plan.period_seconds
    assert found.plan.ahead[GENERATE] <= staleness


@cases("name", NAMES, few=["verl", "slime"])
def test_no_plan_of_a_trainer_is_better_than_the_best_of_all(name: str) -> None:
    facts = facts_for(name)
    free = best_plan(facts, model_of(facts), limits=Limits(gap=0.0))
    assert isinstance(free, Plan)
    assert best(name).plan.period_seconds >= free.period_seconds * (1 - 1e-9)


@cases("name", NAMES, few=["nemo-rl", "openrlhf"])
def test_its_bound_holds_for_other_plans_that_it_can_say(name: str) -> None:
    facts = facts_for(name)
    exact = best_expressible_plan(TRAINERS[name], facts, model_of(facts), limits=Limits(gap=0.0))
    assert exact is not None
    assert best(name).plan.solver.bound_seconds <= exact.plan.period_seconds * (1 + 1e-9)


@cases("name", ["verl", "slime"], few=1)
def test_micro_batches_that_have_to_be_alike_may_be_capped_by_tokens(name: str) -> None:
    facts = facts_for(name)
    tail = facts.workload.model_copy(update={"response": LengthSpec(max=2048, median=64, p99=512)})
    facts = facts.model_copy(update={"workload": tail})
    pins = parse_pins(("critic_train.micro_batch_tokens!=0",), facts.graph)
    found = best_expressible_plan(TRAINERS[name], facts, model_of(facts), pins=pins)
    assert found is not None
    assert found.plan.placement("critic_train").schedule.micro_batch_tokens
    assert list(found.mode.inexpressible(found.plan)) == []


@pytest.mark.check_all
def test_a_way_whose_pool_of_two_kinds_of_nodes_a_stage_cannot_have_has_no_plan() -> None:
    path = Path(__file__).parents[3] / "examples/mixed-32/job.yaml"
    facts = resolve(read_job(path), path.parent).model_copy(update={"staleness": 0})
    verl = TRAINERS["verl"]
    (shared, *_) = verl.modes_for(facts)
    alone = replace(verl, modes=lambda _facts: iter((shared,)))
    assert best_expressible_plan(alone, facts, model_of(facts)) is None


def test_a_job_that_no_way_fits_has_no_plan_and_every_way_is_told() -> None:
    facts = small_facts(memory_bytes=2**10)
    told: list[tuple[int, int]] = []
    assert (
        best_expressible_plan(TRAINERS["verl"], facts, model_of(facts), progress=lambda *one: told.append(one)) is None
    )
    assert [done for done, _ in told] == list(range(told[0][1]))
