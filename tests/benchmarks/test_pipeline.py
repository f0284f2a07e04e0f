"""The pipeline's benchmarks: their jobs are legal, wider spaces predict no slower plans, and differences add up."""

from __future__ import annotations

import pytest

from benchmarks.pipeline import ablation, deals, law, rehearsed
from benchmarks.pipeline.jobs import JOBS, facts_of
from benchmarks.pipeline.speed import facts_of_1024_ranks, plan_by_hand
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.layout_and_schedule_rules import workload_violations
from meshwright.planner.search.re_evaluate import violations_under
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.planner.simulation.simulate import simulate
from meshwright.profiles.lengths import LengthSpec
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan
from tests.seeds import seeds


def test_the_plan_made_by_hand_is_legal_and_takes_its_period() -> None:
    facts = facts_of_1024_ranks()
    plan = plan_by_hand(facts)
    assert facts.cluster.num_ranks == 1024
    assert violations_under(plan, facts) == ()
    assert simulate(plan, steps=2).steps.mean == pytest.approx(plan.period_seconds)


@pytest.mark.parametrize("job", JOBS)
def test_the_jobs_of_the_ablation_are_legal(job: str) -> None:
    assert workload_violations(facts_of(job)) == ()


def long_tailed() -> Facts:
    """Two ranks, and responses of which a few are long."""
    facts = small_facts(ranks_per_node=2, batch_size=8)
    response = LengthSpec(max=256, median=24, p99=200)
    return facts.model_copy(update={"workload": facts.workload.model_copy(update={"response": response})})


@pytest.mark.check_all
def test_every_row_of_the_ablation_predicts_no_slower_plan_than_the_row_before() -> None:
    rows = list(ablation.ablate("small", long_tailed()))
    assert [row.space for row in rows] == [space.name for space in (ablation.SINGLE, *ablation.SPACES)]
    adding = [row for row in rows if row.gain_over_before is not None]
    for before, row in zip([rows[0], *adding], adding, strict=False):
        assert row.predicted_seconds <= before.predicted_seconds * (1 + ablation.GAP)
    assert rows[0].gain == 1
    assert rows[-1].gain == pytest.approx(rows[0].simulated_seconds / rows[-1].simulated_seconds)


@seeds(2, all=4)
def test_the_named_differences_add_up_to_that_of_the_simulated_mean(seed: int) -> None:
    facts = long_tailed()
    plan = random_plan(seed, facts, cost_model_of(facts), deferral=1)
    solver = plan.solver.model_copy(update={"objective_seconds": plan.period_seconds})
    row = law.compare("small", plan.model_copy(update={"solver": solver}))
    assert row.difference == pytest.approx(row.no_barrier + row.tail + row.bursts + row.padding)
    assert row.no_barrier == pytest.approx(0)
    assert row.tail != 0


def test_work_alone_is_dealt_more_evenly_than_work_by_number_and_that_than_tokens_and_a_plan_does_one_of_them() -> None:
    facts = long_tailed()
    found = [
        deals.over_mean(plan, placement.stage, steps=16)
        for plan in (random_plan(seed, facts, cost_model_of(facts)) for seed in range(40))
        for placement in plan.placements
        if placement.layout.dp > 1 and placement.stage != "actor_generate" and not placement.schedule.chunk_tokens
    ]
    assert len(found) > 8
    assert all(planned in (by_number, alone) for _, by_number, alone, planned in found)
    tokens, by_number, alone, _ = map(sum, zip(*found, strict=True))
    assert 0 < alone < by_number < tokens


@pytest.mark.check_all
def test_a_row_is_rehearsed_with_the_lengths_it_is_simulated_with() -> None:
    facts = long_tailed()
    plan = random_plan(1, facts, cost_model_of(facts), deferral=1)
    row = rehearsed.compare("small", "any", plan)
    assert row.simulated_seconds == pytest.approx(
        simulate(plan, Sampled(plan, cost_model_of, seed=0), steps=rehearsed.STEPS, warm_up=1).steps.mean
    )
    assert row.rehearsed_seconds == pytest.approx(row.simulated_seconds * (1 + row.error))
    assert row.error > -0.001
    assert 0 < row.processor_share < 1.1
