"""No plan is faster than the bound of a case that it is in, and a case that is closed by memory has none that fits."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.evaluate import private_bytes
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import SearchCase, search_cases, steps_ahead_patterns, synchronous
from meshwright.planner.plan.verify import verify
from meshwright.planner.proof.cases import Case
from meshwright.planner.proof.space import AMOUNTS, Enumeration, Site, Space
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.hardware import Link
from meshwright.profiles.stages import GENERATE
from tests.planner.jobs import RandomModel, small_facts
from tests.planner.plans import long_facts, random_plan
from tests.seeds import seeds

NUM_PLANS = 60


def space_of(facts: Facts, model: RandomModel, number: int) -> Space:
    return space_and_sites(facts, model, number)[0]


def space_and_sites(facts: Facts, model: RandomModel, number: int) -> tuple[Space, dict[Site, int]]:
    every = Enumeration(facts, model, math.inf)
    ahead = steps_ahead_patterns(PPO_GRAPH, 2)[number]
    return every.space(SearchCase(ahead=ahead, offload=True, keeps_in_flight=True)), every.sites


def case_of(plan: Plan, space: Space, sites: dict[Site, int]) -> Case:
    """The plans in which every stage has, on its site, what it has in this plan or what beats that, and the same pools
    meet."""
    case = Case.whole(space)
    left = {}
    for placement in plan.placements:
        every = space.choices[placement.stage]
        own = private_bytes(placement) if plan.stage(placement.stage).is_trained else placement.resident.total
        seconds = placement.cost.total
        tail = placement.tail_seconds if placement.schedule.chunk_tokens else seconds
        shared, transient = placement.resident.total - own, placement.transient.total
        told = np.array([placement.layout.num_ranks, seconds, tail, own, shared, transient])
        no_more = (every.amounts[: len(told)] <= told[:, None] * (1 + 1e-9) + 1e-9).all(axis=0)
        ranks = plan.pool_of(placement.stage).ranks
        site = sites[Site(plan.facts.cluster.part_of_pool(ranks), placement.layout)]
        left[placement.stage] = every.subset(np.flatnonzero(no_more & (every.site == site)))
    related = {}
    for one, other in combinations(PPO_GRAPH.names, 2):
        common = set(plan.pool_of(one).ranks) & set(plan.pool_of(other).ranks)
        related[frozenset((one, other))] = bool(common)
    return replace(case, remaining=left, intersects=related)


def test_what_is_handed_to_a_later_turn_is_part_of_a_bound() -> None:
    """Two turns are as long as the generation, its hand-over of 1000 s, and the training behind it."""
    space = space_of(small_facts(batch_size=8).model_copy(update={"staleness": 2}), RandomModel(1, memory_scale=1.0), 1)
    slow = replace(space, carried={pair: (turns, 1000.0) for pair, (turns, _) in space.carried.items()})
    rewarded = replace(space, late=frozenset({"actor_train"}), arrival_seconds=2000.0)
    assert set(slow.carried) == {(GENERATE, name) for _, name in space.carried}
    assert Case.whole(space).least_seconds() < 400
    assert 500 < Case.whole(slow).least_seconds() < 900
    assert 1000 < Case.whole(rewarded).least_seconds() < 1400


@pytest.mark.parametrize("number", [0, 1, 2], ids=["in turns", "one ahead", "two ahead"])
@pytest.mark.parametrize("memory", [2.0**20, 2.0**28])
@pytest.mark.slow
def test_no_plan_is_faster_than_its_own_case(number: int, memory: float) -> None:
    base = long_facts() if number == 0 else small_facts(batch_size=8)
    facts = base.model_copy(update={"staleness": 2})
    device = base.cluster.parts[0].device.model_copy(update={"memory_bytes": 2**30})
    facts = facts.model_copy(update={"cluster": facts.cluster.model_copy(update={"device": device})})
    model = RandomModel(1, memory_scale=memory)
    space, sites = space_and_sites(facts, model, number)
    fitting = 0
    for seed in range(NUM_PLANS):
        plan = random_plan(seed, facts, model, steps_ahead_patterns(PPO_GRAPH, 2)[number], deferral=2 - number)
        case = case_of(plan, space, sites)
        assert case.has_choices
        assert case.least_seconds() <= plan.period_seconds * (1 + 1e-12)
        if not verify(plan):
            fitting += 1
            assert not case.is_empty
    assert fitting


def halved(draw: random.Random, case: Case) -> tuple[Case, Case]:
    """Any split of a case that has choices."""
    if draw.random() < 0.3:
        return case.split_by_overlap(*draw.sample(PPO_GRAPH.names, 2))
    stage, amount = draw.choice(PPO_GRAPH.names), draw.choice(AMOUNTS)
    row = case.space.choices[stage].amounts[AMOUNTS.index(amount), case.remaining[stage].indices]
    return case.split_by_amount(stage, amount, float(draw.choice(row.tolist())))


@seeds(3, all=9)
def test_the_halves_of_a_split_are_the_case_and_neither_has_a_smaller_bound(seed: int) -> None:
    facts, draw = small_facts(ranks_per_node=2).model_copy(update={"staleness": 2}), random.Random(seed)
    case = Case.whole(space_of(facts, RandomModel(seed, memory_scale=2.0**28), seed % 3))
    for _ in range(6):
        halves = halved(draw, case)
        for name in PPO_GRAPH.names:
            left = {number for half in halves for number in half.remaining[name].indices.tolist()}
            assert left == set(case.remaining[name].indices.tolist())
        with_choices = [half for half in halves if half.has_choices]
        assert all(half.least_seconds() >= case.least_seconds() * (1 - 1e-12) for half in with_choices)
        assert not case.is_empty or all(half.is_empty for half in halves)
        case = draw.choice(with_choices)


def test_a_bound_need_not_be_more_than_asked() -> None:
    space = space_of(
        small_facts(ranks_per_node=2).model_copy(update={"staleness": 2}), RandomModel(3, memory_scale=1.0), 0
    )
    exact = Case.whole(space).least_seconds()
    assert Case.whole(space).least_seconds(exact / 2) >= exact / 2
    assert Case.whole(space).least_seconds(2 * exact) == exact


def test_the_work_of_all_stages_alone_is_never_more_than_the_bound() -> None:
    space = space_of(
        small_facts(ranks_per_node=2).model_copy(update={"staleness": 2}), RandomModel(5, memory_scale=1.0), 1
    )
    case = Case.whole(space)
    assert case.least_seconds_by_work() <= case.least_seconds()


def test_a_stage_that_reads_in_chunks_where_it_takes_turns_with_the_generation_waits_for_no_hand_over() -> None:
    """What is handed over in 3 ms a message arrives while the generation goes on."""
    facts = small_facts(response=129, ranks_per_node=2)
    slow = Link(seconds=3e-3, bytes_per_second=1e9)
    cluster = facts.cluster.model_copy(update={"inter_node": slow, "host": slow, "intra_node": slow})
    facts = facts.model_copy(update={"cluster": cluster})
    model = cost_model_of(facts)
    chunked = [f"{name}.chunk_tokens=128" for name in ("reward_score", "ref_logprob", "critic_value")]
    pools = ["actor_generate=0:2", "reward_score=0:1", "ref_logprob=1:1", "critic_value=0:1", "actor_logprob=1:1"]
    plan = compile_plan(facts, model, pins=[*chunked, *(name.replace("=", ".pool=") for name in pools)])
    assert isinstance(plan, Plan)
    [scope] = search_cases(synchronous(facts.graph), 0)
    case = Case.whole(Enumeration(facts, model, math.inf).space(scope))
    for placement in plan.placements:
        num_ranks = placement.layout.num_ranks
        case = case.split_by_amount(placement.stage, "ranks", num_ranks)[0]
        if num_ranks > 1:
            case = case.split_by_amount(placement.stage, "ranks", num_ranks - 1)[1]
    for one, other in combinations(facts.graph.names, 2):
        meet = set(plan.pool_of(one).ranks) & set(plan.pool_of(other).ranks)
        case = case.split_by_overlap(one, other)[0 if meet else 1]
    assert case.least_seconds() <= plan.period_seconds
