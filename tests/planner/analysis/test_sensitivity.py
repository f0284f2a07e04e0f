"""What a larger input does to a plan whose placements stay as they are."""

from __future__ import annotations

import pytest

from meshwright.cost_models.blended import cost_model
from meshwright.cost_models.protocol import CostModel
from meshwright.planner.analysis.sensitivity import Sensitivity, rate_sensitivities, sensitivities
from meshwright.planner.job.job import Facts
from meshwright.profiles.lengths import LengthSpec
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan
from tests.seeds import seeds


def analytic(facts: Facts) -> CostModel:
    return cost_model(facts.cluster, facts.workload, facts.precision)


def found(seed: int = 0, **workload: object) -> dict[str, Sensitivity]:
    facts = small_facts(memory_bytes=2**50, nodes=2, ranks_per_node=2)
    facts = facts.model_copy(update={"workload": facts.workload.model_copy(update=workload)})
    return {one.name: one for one in sensitivities(random_plan(seed, facts, analytic(facts)), analytic)}


@seeds(1, all=3)
def test_faster_hardware_is_never_slower_and_never_faster_than_in_proportion(seed: int) -> None:
    for name, one in found(seed).items():
        if name not in ("batch size", "response length"):
            assert one.elasticity is not None
            faster = -one.elasticity if name == "time to launch a kernel" else one.elasticity
            assert -1 - 1e-9 <= faster <= 1e-9


def test_of_the_hardware_alone_the_same_is_said() -> None:
    facts = small_facts()
    plan = random_plan(0, facts, analytic(facts))
    every = sensitivities(plan, analytic)
    of_hardware = [one for one in every if one.name not in ("batch size", "response length")]
    assert list(rate_sensitivities(plan, analytic)) == of_hardware


@pytest.mark.parametrize(
    "response",
    [
        LengthSpec(max=128, fixed=128),
        LengthSpec(max=128, median=30, p99=100),
        LengthSpec(max=128, histogram=((10, 1.0), (100, 1.0))),
    ],
)
def test_longer_responses_take_longer_in_whatever_form_they_are_given(response: LengthSpec) -> None:
    one = found(response=response)["response length"]
    assert one.elasticity is not None
    assert one.elasticity > 0


def test_the_batch_grows_to_what_the_placements_divide() -> None:
    one = found()["batch size"]
    assert one.violations == ()
    assert one.factor * 16 == round(one.factor * 16)
    assert one.elasticity is not None
    assert one.elasticity > 0


def test_what_matters_most_comes_first_and_an_illegal_input_says_why() -> None:
    answers = list(found(response=LengthSpec(max=448, fixed=448)).values())
    sizes = [abs(one.elasticity or 0.0) for one in answers]
    assert sizes == sorted(sizes, reverse=True)
    longer = next(one for one in answers if one.name == "response length")
    assert longer.period_seconds is None
    assert "exceeds the 512 positions" in longer.violations[0]
