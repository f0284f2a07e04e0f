"""List scheduling and memory, on numbers worked out by hand."""

from __future__ import annotations

import pytest

from meshwright.cost_models.cost import Cost, Term
from meshwright.planner.plan.evaluate import (
    Task,
    evaluate,
    host_bytes,
    keeps_generator,
    list_schedule,
    peak_bytes,
    resident_bytes,
)
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import pattern_ahead
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.layout import Layout
from meshwright.profiles.stages import GENERATE
from tests.planner.plans import random_plan
from tests.seeds import seeds


def task(name: str, ranks: set[int], seconds: float, *after: tuple[str, float]) -> Task:
    return Task(name=name, ranks=frozenset(ranks), seconds=seconds, after=after)


def test_ranks_take_tasks_in_order_and_as_early_as_they_can() -> None:
    """a holds both ranks for 2 s; b and c then run side by side; d needs c's output half a second later."""
    order = [
        task("a", {0, 1}, 2.0),
        task("b", {0}, 3.0, ("a", 0.0)),
        task("c", {1}, 1.0, ("a", 0.25)),
        task("d", {1}, 1.0, ("c", 0.5)),
    ]
    times = list_schedule(order)
    assert [(times[name].start, times[name].end) for name in "abcd"] == [(0, 2), (2, 5), (2.25, 3.25), (3.75, 4.75)]


def test_a_task_that_takes_no_time_waits_for_no_rank() -> None:
    times = list_schedule([task("a", {0}, 2.0), task("nothing", {0}, 0.0), task("b", {0}, 1.0, ("nothing", 0.0))])
    assert times["nothing"].end == 0.0
    assert times["b"].start == 2.0


@seeds(4, all=20)
def test_evaluating_twice_changes_nothing(seed: int) -> None:
    plan = evaluate(random_plan(seed))
    assert evaluate(plan) == plan, f"seed {seed}"


@seeds(4, all=20)
def test_the_period_lies_between_the_longest_stage_and_everything_in_turn(seed: int) -> None:
    plan = random_plan(seed)
    tasks = [item.cost.total for item in (*plan.placements, *plan.refits)]
    lags = sum(edge.cost.total for edge in plan.edges)
    assert max(tasks) <= plan.period_seconds <= sum(tasks) + lags


@seeds(2, all=6)
def test_what_is_read_two_turns_later_makes_a_turn_half_as_much_longer(seed: int) -> None:
    """A hand-over of a million seconds has as long as the two turns that pass before it is read."""
    plan = random_plan(seed, ahead=pattern_ahead(PPO_GRAPH, 2))
    late = Cost((Term("experience", 1e6),))
    edges = tuple(
        edge.model_copy(
            update={"cost": late if edge.producer == GENERATE and edge.consumer == "actor_train" else Cost()}
        )
        for edge in plan.edges
    )
    found = evaluate(plan.model_copy(update={"edges": edges}))
    begun = found.placement("actor_train").start_seconds - found.placement(GENERATE).end_seconds
    assert found.period_seconds == pytest.approx((1e6 - begun) / 2)


def placed(plan: Plan, stage: str, pool: str, layout: Layout, memory: tuple[float, float, float]) -> Plan:
    weights, other, transient = memory
    update = {
        "pool": pool,
        "layout": layout,
        "resident": Cost((Term("weights", weights), Term("other", other))),
        "transient": Cost((Term("activations", transient),)),
    }
    placements = tuple(p.model_copy(update=update) if p.stage == stage else p for p in plan.placements)
    return plan.model_copy(update={"placements": placements})


def test_a_shared_copy_is_held_once_and_only_the_largest_transient_counts() -> None:
    """The trained copy is 10 + 5, generation shares it and keeps 1 besides, ref is 7; transients are 3, 8 and 2."""
    plan = random_plan(0)
    pool = plan.pools[0].name
    rank = plan.pools[0].first_rank
    elsewhere = next(p.name for p in plan.pools if rank not in p.ranks)
    for stage in ("reward_score", "critic_value", "actor_logprob", "critic_train"):
        plan = placed(plan, stage, elsewhere, Layout(), (0, 0, 0))
    plan = placed(plan, "actor_train", pool, Layout(tp=2), (10, 5, 3))
    plan = placed(plan, "actor_generate", pool, Layout(tp=2), (10, 1, 8))
    plan = placed(plan, "ref_logprob", pool, Layout(), (7, 0, 2))
    assert peak_bytes(plan)[rank] == 10 + 5 + 1 + 7 + 8
    assert resident_bytes(plan, plan.placement("actor_generate")) == 1
    apart = placed(plan, "actor_generate", pool, Layout(dp=2), (10, 1, 8))
    assert peak_bytes(apart)[rank] == 10 + 5 + 11 + 7 + 8


def test_host_memory_is_that_of_the_node_with_the_most_waiting_in_it() -> None:
    """Two stages keep 3 and 4 bytes for each of their ranks there."""
    plan = random_plan(0)
    waiting = {"actor_train": 3, "ref_logprob": 4}
    placements = tuple(
        p.model_copy(update={"host": Cost((Term("state", waiting.get(p.stage, 0)),))}) for p in plan.placements
    )
    plan = plan.model_copy(update={"placements": placements})
    per_node = plan.facts.cluster.ranks_per_node
    of_node = [
        sum(waiting[name] * (rank // per_node == node) for name in waiting for rank in plan.pool_of(name).ranks)
        for node in range(plan.facts.cluster.nodes)
    ]
    assert host_bytes(plan) == max(of_node)


def test_a_generator_is_kept_where_what_it_allocates_fits_beside_the_peak_of_its_fullest_rank() -> None:
    plan = evaluate(random_plan(0))
    generation = plan.placement(GENERATE)
    ranks = plan.pool(generation.pool).ranks
    free = min(plan.facts.cluster.usable_bytes(rank) - plan.peak_bytes_per_rank[rank] for rank in ranks)
    for allocated, kept in ((free, True), (free + 1, False)):
        placement = generation.model_copy(update={"transient": Cost((Term("KV cache", float(allocated)),))})
        others = tuple(one for one in plan.placements if one.stage != GENERATE)
        assert keeps_generator(plan.model_copy(update={"placements": (placement, *others)})) is kept
