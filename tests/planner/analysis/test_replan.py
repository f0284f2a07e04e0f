"""A plan made anew costs what moves, earns it back or stays, and is near one that is made from scratch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.planner.analysis.replan import PacedCostModel, Replanned, Simulated, facts_of_run, replan
from meshwright.planner.compile import best_plan
from meshwright.planner.job.job import Facts, read_job, resolve
from meshwright.planner.job.whatif_settings import with_setting
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import verify
from meshwright.planner.search.re_evaluate import re_evaluate
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.solver.result import Limits
from meshwright.profiles.errors import BadInput
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.trace import Span
from tests.planner.jobs import ToyModel, small_facts

FACTS = small_facts(nodes=2, ranks_per_node=2, batch_size=8)
JOB = Path(__file__).parents[3] / "examples" / "long-tail-64" / "job.yaml"


def planned(facts: Facts) -> Plan:
    found = best_plan(facts, ToyModel(facts))
    assert isinstance(found, Plan)
    return found


PLAN = planned(FACTS)


def replanned(facts: Facts, **kw: Limits) -> Replanned:
    return replan(PLAN, facts, ToyModel(facts), **kw)


def spans(plan: Plan) -> list[Span]:
    """Three steps as planned."""
    return [
        Span(
            step=step,
            instruction=p.stage,
            kind="stage",
            rank=rank,
            start_seconds=0.0,
            end_seconds=p.cost.total,
            clock="measured",
        )
        for step in range(3)
        for p in plan.placements
        for rank in plan.pool(p.pool).ranks
    ]


def test_where_nothing_has_changed_nothing_moves_that_does_not_earn_it() -> None:
    found = replanned(FACTS)
    assert found.old_plan_seconds == PLAN.period_seconds
    assert found.plan.period_seconds <= PLAN.period_seconds
    if found.plan.placements == PLAN.placements:
        assert (found.moving, found.break_even_steps) == ((), None)


def test_where_a_node_is_lost_the_plan_cannot_go_on_and_its_state_moves() -> None:
    less = with_setting(FACTS, {"cluster.nodes": 1})
    found = replanned(less)
    assert found.old_plan_seconds is None
    assert "ranks" in found.reason_not_kept
    assert verify(found.plan) == ()
    assert found.plan.facts.cluster.num_ranks == 2
    assert found.break_even_steps == 0
    moved = {one.what for one in found.moving}
    assert {"actor weights", "critic weights"} <= moved
    assert found.moving_seconds == pytest.approx(math.fsum(one.seconds for one in found.moving))
    assert all(one.num_bytes > 0 and one.seconds > 0 for one in found.moving)


def test_moving_is_earned_back_when_the_steps_have_saved_as_much() -> None:
    slow = best_plan(FACTS, ToyModel(FACTS), pins=())
    assert isinstance(slow, Plan)
    longer = with_setting(FACTS, {"workload.response.max": 384, "workload.response.fixed": 384})
    found = replanned(longer, limits=Limits(gap=0.0))
    assert found.old_plan_seconds is not None
    saved = found.old_plan_seconds - found.plan.period_seconds
    if found.break_even_steps is None:
        assert saved <= 0
    else:
        assert found.break_even_steps * saved >= found.moving_seconds
        assert (found.break_even_steps - 1) * saved < found.moving_seconds


def test_a_pause_is_earned_back_too_and_what_a_search_leaves_open_or_was_off_earns_nothing() -> None:
    found = replace(replanned(FACTS), old_plan_seconds=2 * PLAN.period_seconds, moving=())
    saved = 2 * PLAN.period_seconds - found.plan.period_seconds
    assert found.payback_steps_with_pause(0.0) == 0
    assert found.payback_steps_with_pause(9.5 * saved) == 10
    assert replace(found, relative_error=0.9).payback_steps_with_pause(0.0) is None
    for share, earns in ((0.995, False), (0.98, True)):
        new = found.plan.model_copy(update={"period_seconds": share * 2 * PLAN.period_seconds})
        assert (replace(found, plan=new).payback_steps_with_pause(0.0) is not None) is earns
    assert replace(found, old_plan_seconds=None).payback_steps_with_pause(1e9) == 0
    half = replace(found, simulated=Simulated(old_plan_seconds=1.5 * saved, seconds=saved))
    assert half.payback_steps_with_pause(9.5 * saved) == 19
    slower = replace(found, simulated=Simulated(old_plan_seconds=1.0, seconds=1.1))
    assert slower.payback_steps_with_pause(0.0) is None


def test_with_limits_the_answer_is_proven() -> None:
    less = with_setting(FACTS, {"cluster.nodes": 1})
    found, best = replanned(less, limits=Limits(gap=0.01)), planned(less)
    assert found.plan.solver.gap <= 0.01
    assert found.plan.period_seconds <= best.period_seconds / 0.99


def test_what_fits_nowhere_is_said_in_a_sentence() -> None:
    with pytest.raises(BadInput, match="no plan fits what is left"):
        replanned(small_facts(ranks_per_node=2, batch_size=8, memory_bytes=2**16))


def test_a_stage_that_was_slower_than_predicted_stays_so() -> None:
    twice = PacedCostModel(ToyModel(FACTS), {"actor_generate": 2.0})
    placement = PLAN.placement("actor_generate")
    found = replan(PLAN, FACTS, twice)
    assert found.old_plan_seconds is not None
    assert found.old_plan_seconds > PLAN.period_seconds
    kept = replan(PLAN, FACTS, PacedCostModel(ToyModel(FACTS), {}))
    assert kept.old_plan_seconds == PLAN.period_seconds
    assert placement.cost.total > 0


def test_lost_nodes_leave_the_others() -> None:
    left = facts_of_run(PLAN, FACTS, spans(PLAN), lost_nodes=1).cluster
    assert isinstance(left, Cluster)
    assert left.nodes == 1
    assert facts_of_run(PLAN, FACTS, spans(PLAN)).cluster == FACTS.cluster
    with pytest.raises(BadInput, match="--lost-nodes 2 leaves none of 2 nodes; use a smaller number"):
        facts_of_run(PLAN, FACTS, spans(PLAN), lost_nodes=2)


@pytest.mark.check_all
def test_three_times_the_lengths_on_seven_of_eight_nodes_are_planned_at_once() -> None:
    """SIMULATED: by the cost model alone."""
    facts = resolve(read_job(JOB), JOB.parent)
    assert isinstance(facts.cluster, Cluster)

    def model(facts: Facts) -> AnalyticModel:
        assert isinstance(facts.cluster, Cluster)
        return AnalyticModel(facts.cluster, facts.workload, facts.precision)

    first = best_plan(facts, model(facts))
    assert isinstance(first, Plan)
    lengths = {"workload.response.median": 1536.0, "workload.response.p99": 24576.0}
    changed = with_setting(facts, {"cluster.nodes": 7, **lengths})
    found = replan(first, changed, model(changed))
    assert found.plan.solver.work.num_time_costs < 4000
    assert found.plan.solver.work.num_models <= 4
    scratch = best_plan(changed, model(changed))
    assert isinstance(scratch, Plan)
    assert found.plan.period_seconds <= 1.03 * scratch.period_seconds


@pytest.mark.check_all
def test_a_plan_for_the_lengths_that_are_met_is_as_much_faster_as_it_is_simulated_to_be() -> None:
    """SIMULATED, with lengths that are drawn: a third of those that were planned for; three times as long ones do not
    fit in memory under the plan as it is."""
    facts = resolve(read_job(JOB), JOB.parent)
    facts = with_setting(facts, {"cluster.nodes": 2, "workload.batch_size": 256, "staleness": 2})
    first = best_plan(facts, cost_model_of(facts), limits=Limits(gap=0.05))
    assert isinstance(first, Plan)

    def met(times: float) -> Facts:
        return with_setting(facts, {"workload.response.median": 512 * times, "workload.response.p99": 8192 * times})

    shorter, longer = met(1 / 3), met(3.0)
    found = replan(first, shorter, cost_model_of(shorter))
    assert found.old_plan_seconds is not None
    assert found.break_even_steps is not None
    assert found.break_even_steps <= 12
    kept, new = (
        simulate(plan, Sampled(plan, cost_model_of, seed=0), steps=20).steps.mean
        for plan in (re_evaluate(first, shorter, cost_model_of(shorter)), found.plan)
    )
    assert new / kept == pytest.approx(found.plan.period_seconds / found.old_plan_seconds, abs=0.01)
    assert new < kept
    assert "GiB for actor_generate" in replan(first, longer, cost_model_of(longer)).reason_not_kept
