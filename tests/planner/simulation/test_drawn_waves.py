"""Steps of dynamic sampling in virtual time."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.planner.analysis.wave_size import with_wave
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.simulation.simulated_generation import sample_waves
from meshwright.profiles.stages import GENERATE
from tests.planner.analysis.test_oversampling import planned, sampled_facts


@pytest.fixture(scope="module", params=[16, 32, 48])
def plan(request: pytest.FixtureRequest) -> Plan:
    return planned(with_wave(sampled_facts(), request.param))


def test_a_step_trains_on_as_many_sequences_as_a_batch_has(plan: Plan) -> None:
    workload = plan.facts.workload
    for step in range(20):
        kept = sample_waves(plan, seed=0, step=step).kept
        assert sum(map(len, kept)) == workload.batch_size
        for rows in kept:
            groups = np.sort(rows).reshape(-1, workload.group_size) // workload.group_size
            assert (groups == groups[:, :1]).all()
            assert len(set(rows.tolist())) == len(rows)
            assert rows.max(initial=0) < workload.wave.batch_size


def test_steps_need_as_many_waves_on_average_as_is_expected(plan: Plan) -> None:
    workload = plan.facts.workload
    assert workload.dynamic_sampling
    number = np.mean([sample_waves(plan, seed=1, step=step).number for step in range(2000)])
    assert number == pytest.approx(workload.dynamic_sampling.expected_waves(workload.num_prompts), rel=0.02)


def test_no_place_among_the_prompts_is_likelier_to_be_trained_on(plan: Plan) -> None:
    """Lengths are drawn in order: a bias for the first prompts would be one for short ones."""
    size = plan.facts.workload.wave.batch_size
    first = np.concatenate([sample_waves(plan, seed=2, step=step).kept[0] for step in range(1000)])
    counts = np.bincount(first * 4 // size, minlength=4)
    assert counts / counts.sum() == pytest.approx([0.25] * 4, abs=0.02)


def test_the_mean_step_is_the_planned_one(plan: Plan) -> None:
    found = simulate(plan, Sampled(plan, cost_model_of, seed=3), steps=200)
    assert found.steps.mean == pytest.approx(plan.period_seconds, rel=0.03)


def test_the_cache_is_used_as_the_waves_of_a_step_do(plan: Plan) -> None:
    drawn, placement = Sampled(plan, cost_model_of, seed=3), plan.placement(GENERATE)
    (use,) = simulate(plan, drawn, steps=10).caches
    assert use.blocks == plan.facts.workload.wave.cache_need(placement.schedule, placement.layout.dp).blocks
    assert use.mean_share
    assert use.peak_share
    assert 0 < use.mean_share < use.peak_share < 1.5
    assert len(drawn.of_step(0).held_blocks[GENERATE]) == placement.layout.dp
