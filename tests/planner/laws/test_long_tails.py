"""Long responses among short ones, for many steps: what is simulated of a plan is what was predicted of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.compile import best_plan
from meshwright.planner.job.job import read_job, resolve
from meshwright.planner.job.whatif_settings import with_setting
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.solver.result import Limits
from meshwright.profiles.stages import GENERATE
from tests.seeds import cases

JOB = Path(__file__).parents[3] / "examples/long-tail-64/job.yaml"


@pytest.mark.slow
@cases("batches", [2, 4], few=1)
def test_batches_in_flight_take_as_long_as_they_are_predicted_to(batches: int) -> None:
    """A row that is long reads its own cache in every round and does not slow down the short ones beside it, so that
    it matters little whether rows begin together, as turns that are costed do, or replicas keep a pace."""
    facts = resolve(read_job(JOB), JOB.parent)
    facts = with_setting(facts, {"cluster.nodes": 2, "workload.batch_size": 256, "staleness": batches - 1})
    pins = parse_pins((f"{GENERATE}.batches_in_flight={batches}", f"{GENERATE}.dp=2"), facts.graph)
    plan = best_plan(facts, cost_model_of(facts), pins=pins, limits=Limits(gap=0.05))
    assert isinstance(plan, Plan)
    steps = simulate(plan, Sampled(plan, cost_model_of, seed=0), steps=20).steps
    assert steps.mean == pytest.approx(plan.period_seconds, rel=0.04)
