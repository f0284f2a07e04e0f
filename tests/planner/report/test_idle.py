"""The time of each pool: what it is busy with, and what it waits for."""

from __future__ import annotations

from meshwright.planner.report.resource_sections import _pool_bar, idle
from meshwright.planner.simulation.simulate import Simulation, TimeShare, TimeUse
from meshwright.profiles.algorithms import PPO_GRAPH
from tests.planner.report.pages import Outline, contents_of, plan_of, titles
from tests.seeds import seeds


def simulation(seed: int) -> Simulation:
    return contents_of(plan_of(seed)).simulation


@seeds(2, all=5)
def test_every_share_of_every_pool_is_a_box_and_waiting_is_hatched(seed: int) -> None:
    found = simulation(seed)
    drawn = idle(found, PPO_GRAPH)
    shares = [share for use in found.pools for share in (*use.busy, *use.waits)]
    assert len(titles(drawn)) == 1 + len(shares)
    waits = sum(len(use.waits) for use in found.pools)
    assert drawn.count('class="hatched"') == waits + 1  # and in the legend


def test_the_idle_share_is_told_with_its_largest_causes() -> None:
    found = simulation(2)
    text = Outline(idle(found, PPO_GRAPH)).text
    for use in found.pools:
        assert f"{use.idle_share:.1%}" in text
        assert not use.waits or any(cell.startswith(use.waits[0].what) for cell in text)


def test_whose_time_it_is_stands_beside_it() -> None:
    assert "SIMULATED" in Outline(idle(simulation(0), PPO_GRAPH)).text


def test_the_boxes_of_a_pool_follow_each_other_over_all_of_its_time() -> None:
    busy = TimeShare("actor_generate", 0.25), TimeShare("actor_train", 0.125)
    use = TimeUse(name="all", ranks=(0,), idle_share=0.625, busy=busy, waits=(TimeShare("reward_score", 0.625),))
    assert [(box.start, box.end) for box in _pool_bar(0, use, PPO_GRAPH)] == [(0.0, 25.0), (25.0, 37.5), (37.5, 100.0)]
