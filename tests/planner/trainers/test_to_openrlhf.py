"""OpenRLHF's own rules hold in what is written for it."""

from __future__ import annotations

import pytest

from meshwright.planner.plan.plan import Plan
from meshwright.profiles.algorithms import PPO_GRAPH
from tests.planner.trainers.configurations import configuration, plan_ahead
from tests.planner.trainers.plans import best


@pytest.fixture(params=["together", "ahead"])
def plan(request: pytest.FixtureRequest) -> Plan:
    return best("openrlhf").plan if request.param == "together" else plan_ahead("openrlhf")


def test_all_models_have_one_degree_of_tensor_and_of_ring_and_no_pipeline(plan: Plan) -> None:
    found = configuration("openrlhf", plan)
    layouts = [p.layout for p in plan.placements if not PPO_GRAPH.by_name[p.stage].generates]
    assert {layout.tp for layout in layouts} == {found["ds.tensor_parallel_size"]}
    assert {layout.cp for layout in layouts} == {found["ds.ring_attn_size"]}
    assert {layout.pp for layout in layouts} == {1}
    assert not any(layout.sp for layout in layouts)


def test_models_together_have_as_many_ranks_as_the_engines() -> None:
    found = configuration("openrlhf")
    assert found["train.colocate_all"] is True
    ranks = found["actor.num_nodes"] * found["actor.num_gpus_per_node"]  # type: ignore[operator]
    assert ranks == found["vllm.num_engines"] * found["vllm.tensor_parallel_size"]  # type: ignore[operator]


def test_engines_sleep_only_where_generation_is_not_ahead() -> None:
    assert configuration("openrlhf")["vllm.enable_sleep"] is True
    found = configuration("openrlhf", plan_ahead("openrlhf"))
    assert (found["train.async_enable"], found["vllm.enable_sleep"]) == (True, False)


def test_groups_that_lie_together_have_as_many_ranks(plan: Plan) -> None:
    found = configuration("openrlhf", plan)
    for one, other in (("actor", "ref"), ("critic", "reward")):
        for what in ("num_nodes", "num_gpus_per_node"):
            assert found[f"{one}.{what}"] == found[f"{other}.{what}"]
