"""Simulated generation with drafts: the same sequences in shorter rounds."""

from __future__ import annotations

import pytest

from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.plan import Plan
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.speculation import Speculation
from meshwright.profiles.stages import GENERATE
from tests.planner.drawn import model_of
from tests.planner.jobs import small_facts


def plan_of(draft_tokens: int, response: LengthSpec) -> Plan:
    facts = small_facts()
    update = {"response": response, "speculation": Speculation(acceptance=(0.8, 0.7))}
    facts = facts.model_copy(update={"workload": facts.workload.model_copy(update=update)})
    pins = (
        f"{GENERATE}.draft_tokens={draft_tokens}",
        f"{GENERATE}.layout=tp1,pp1,dp1",
        f"{GENERATE}.generation_slots=8",
    )
    plan = compile_plan(facts, model_of(facts), pins=pins)
    assert isinstance(plan, Plan)
    return plan


@pytest.mark.parametrize("draft_tokens", [0, 2])
@pytest.mark.parametrize(
    "response", [LengthSpec(max=128, fixed=100), LengthSpec(max=128, median=40, p99=120)], ids=["fixed", "tail"]
)
def test_simulated_generation_takes_as_long_as_planned(draft_tokens: int, response: LengthSpec) -> None:
    plan = plan_of(draft_tokens, response)
    drawn = Sampled(plan, model_of, seed=0)
    mean = sum(sum(drawn.of_step(step).seconds[GENERATE]) for step in range(20)) / 20
    assert mean == pytest.approx(plan.placement(GENERATE).cost.total, rel=0.02 if response.fixed else 0.1)


def test_simulated_rounds_with_drafts_are_as_much_shorter_as_the_cost_model_says() -> None:
    seconds, planned = [], []
    for draft_tokens in (0, 2):
        plan = plan_of(draft_tokens, LengthSpec(max=128, median=40, p99=120))
        seconds.append(sum(Sampled(plan, model_of, seed=0).of_step(1).seconds[GENERATE]))
        planned.append(plan.placement(GENERATE).cost.total)
    assert seconds[1] / seconds[0] == pytest.approx(planned[1] / planned[0], rel=0.05)
    assert planned[1] < planned[0]
