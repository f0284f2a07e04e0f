"""Steps that train on the best of several samples, in virtual time."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.durations import HeldBlocks
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.planner.simulation.simulate import simulate
from meshwright.planner.simulation.simulated_generation import BestOfGeneration, Generated
from meshwright.profiles.lengths import LengthSpec
from tests.planner.analysis.test_best_samples import best_facts, made


@pytest.fixture(scope="module")
def plan() -> Plan:
    facts = best_facts()
    response = LengthSpec(max=128, histogram=((32, 1.0), (64, 1.0), (128, 1.0)))
    return made(
        facts.model_copy(update={"workload": facts.workload.model_copy(update={"response": response})}),
    )


def of_all(plan: Plan, step: int) -> Generated:
    """Prompts that tell their numbers, and responses that tell their rows."""
    drawn = plan.facts.workload.candidates
    return Generated(
        prompts=np.arange(drawn.num_prompts).repeat(drawn.group_size),
        responses=np.arange(drawn.batch_size) + step,
        sampled=np.arange(drawn.batch_size) + step,
        seconds=(1.0, 2.0),
        live=(3.0, 4.0),
        held=(HeldBlocks(5.0, 6), HeldBlocks(7.0, 8)),
        tokens_by_staleness={},
    )


def test_as_many_samples_of_every_prompt_are_trained_on_as_are_kept(plan: Plan) -> None:
    played = BestOfGeneration(plan, lambda step: of_all(plan, step), seed=0)
    for step in range(20):
        found = played.of_step(step)
        assert np.bincount(found.prompts).tolist() == [4] * 16
        assert len(set(found.responses.tolist())) == 64
        assert found.tokens_by_staleness == {0: found.responses.sum()}
        assert found.seconds == (1.0, 2.0)
        assert found.held == (HeldBlocks(5.0, 6), HeldBlocks(7.0, 8))
        assert len(played.scored(step)) == 256


def test_every_sample_of_a_prompt_is_as_likely_to_be_kept(plan: Plan) -> None:
    played = BestOfGeneration(plan, lambda step: of_all(plan, step), seed=1)
    places = np.concatenate([played.kept(step) for step in range(2000)]) % 16
    counts = np.bincount(places, minlength=16)
    assert counts / counts.sum() == pytest.approx([1 / 16] * 16, abs=0.003)


def test_the_mean_step_is_about_the_planned_one(plan: Plan) -> None:
    found = simulate(plan, Sampled(plan, cost_model_of, seed=3), steps=100)
    assert found.steps.mean == pytest.approx(plan.period_seconds, rel=0.05)
