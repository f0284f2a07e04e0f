"""Memory binds a stage exactly when a faster choice on its ranks has no room."""

from __future__ import annotations

import pytest

from meshwright.planner.analysis.alternatives import memory_limited
from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.plan import Plan
from tests.planner.jobs import ToyModel, small_facts

MIB = 2**20


def plan(memory_bytes: int) -> Plan:
    facts = small_facts(ranks_per_node=2, memory_bytes=memory_bytes)
    pins = ("actor_train.pool=0:2", "actor_train.layout=dp2")
    found = compile_plan(facts, ToyModel(facts), pins=pins)
    assert isinstance(found, Plan)
    return found


def test_with_room_for_everything_only_time_binds() -> None:
    roomy = plan(1024 * MIB)
    assert memory_limited(roomy, ToyModel(roomy.facts)) == ()


def test_what_is_held_back_would_be_faster_and_lacks_room() -> None:
    tight = plan(11 * MIB)
    found = memory_limited(tight, ToyModel(tight.facts))
    assert found
    for one in found:
        assert 0 < one.gain_seconds < tight.placement(one.stage).cost.total
        assert one.lacking_bytes > 0
        assert one.layout.num_ranks == tight.pool_of(one.stage).num_ranks
    gains = [one.gain_seconds for one in found]
    assert gains == sorted(gains, reverse=True)


@pytest.mark.parametrize("memory", [10, 12])
def test_a_pinned_choice_is_held_back_only_from_what_the_pin_allows(memory: int) -> None:
    found = memory_limited(plan(memory * MIB), ToyModel(small_facts(ranks_per_node=2)))
    assert all(str(one.layout) == "tp1,pp1,dp2" for one in found if one.stage == "actor_train")
