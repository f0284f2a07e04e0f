"""What practice and other papers say of placements, beside what our model says, and why where the two differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cost_models.blended import cost_model
from meshwright.cost_models.protocol import CostModel, StageQuery
from meshwright.planner.compile import best_plan
from meshwright.planner.job.job import Facts, read_job, resolve
from meshwright.planner.plan.layout_and_schedule_rules import layout_rules, schedules
from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.solver.result import Limits
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec, read_model

EXAMPLES = Path(__file__).parents[3] / "examples"
LIMITS = Limits(max_deterministic_time=20.0, gap=0.01)


def facts_of(name: str) -> Facts:
    path = EXAMPLES / name / "job.yaml"
    return resolve(read_job(path), path.parent)


def model_of(facts: Facts) -> CostModel:
    return cost_model(facts.cluster, facts.workload, facts.precision)


def planned(facts: Facts, *pins: str) -> Plan:
    found = best_plan(facts, model_of(facts), pins=parse_pins(pins, PPO_GRAPH), limits=LIMITS)
    assert isinstance(found, Plan)
    return found


@pytest.mark.slow
def test_on_eight_a100_80gb_our_plan_is_at_least_as_fast_as_the_one_by_hand() -> None:
    """OpenRLHF's practice: 4 ranks generate, 2 hold actor and reference, 2 hold critic and reward model."""
    facts = facts_of("7b-8xa100-80gb")
    pools = {"actor_generate": "0:4", "reward_score": "6:2", "critic_value": "6:2", "critic_train": "6:2"}
    by_hand = planned(facts, *(f"{stage.name}.pool={pools.get(stage.name, '4:2')}" for stage in PPO_GRAPH.stages))
    ours = planned(facts)
    assert ours.period_seconds <= by_hand.period_seconds * (1 + LIMITS.gap)
    assert by_hand.period_seconds > 1.5 * ours.period_seconds


@pytest.mark.check_all
def test_on_eight_a100_40gb_a_plan_fits_without_offload_and_one_with_it_is_far_faster() -> None:
    """Practice says that nothing fits without offloading reference and reward model.

    Our model finds that something does: weights, gradients and moments of the four models are 31 GiB a rank when each
    is cut eightfold, and 36.8 are usable. But what is left holds few keys and values, so generation crawls.
    """
    facts = facts_of("7b-8xa100-40gb")
    kept = planned(facts, *(f"{stage.name}.offload=none" for stage in PPO_GRAPH.stages))
    moved = planned(facts, "ref_logprob.offload=weights", "reward_score.offload=weights")
    assert moved.period_seconds < 0.5 * kept.period_seconds
    assert planned(facts).period_seconds <= moved.period_seconds * (1 + LIMITS.gap)
    for stage in ("actor_generate", "reward_score", "ref_logprob", "critic_value", "actor_train", "critic_train"):
        layout = kept.placement(stage).layout
        assert layout.tp * layout.pp > layout.dp


def generation_tp(spec: ModelSpec) -> int:
    """The tp of the fastest generation of one replica-filled node of A100-80GB when the model has it to itself."""
    facts = facts_of("7b-8xa100-80gb")
    facts = facts.model_copy(update={"models": facts.models.model_copy(update={"actor": spec})})
    model, stage = model_of(facts), PPO_GRAPH.by_name["actor_generate"]
    found = []
    for tp in (1, 2, 4, 8):
        layout = Layout(tp=tp, dp=8 // tp)
        if layout_rules(facts, stage, layout):
            continue
        for schedule in schedules(facts, stage, layout):
            query = StageQuery(stage=stage, model=spec, layout=layout, schedule=schedule)
            if model.memory(query).peak_bytes <= facts.cluster.device.usable_bytes:
                found.append((model.seconds(query).total, tp))
    return min(found)[1]


def test_the_larger_the_model_the_larger_the_tp_that_generates_best() -> None:
    """HybridFlow, section 8.4: 7B generates best at a smaller tp than 13B, and that at one no larger than 70B."""
    small, middle = (read_model(EXAMPLES / "models" / name) for name in ("llama-2-7b", "llama-2-13b"))
    large = read_model(EXAMPLES / "models" / "llama-2-70b")
    found = [generation_tp(spec) for spec in (small, middle, large)]
    assert found[0] < found[1] <= found[2]
