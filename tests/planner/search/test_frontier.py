"""Nothing on a frontier is beaten, and whatever is left out is beaten, too large, or against a rule."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from meshwright.cost_models.protocol import StageQuery
from meshwright.planner.plan.pins import Ranks, parse_pins
from meshwright.planner.search.choice_costs import DOMINATED, TOO_LARGE, Candidate, cost_query
from meshwright.planner.search.frontiers import frontier
from meshwright.planner.search.legal_choices import legal_choice_table, legal_choices
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.layout import Layout
from tests.planner.jobs import RandomModel, small_facts

FACTS = small_facts(batch_size=8)
MODEL = RandomModel(3, 2**29)


def stands_beside(one: Layout, other: Layout) -> bool:
    """Whether a pipeline in chunks can be replaced by one in other chunks or in none; others only by their like."""
    return one == other or (other.vpp > 1 and replace(one, vpp=1) == replace(other, vpp=1))


def beats(one: Candidate, other: Candidate) -> bool:
    return one.amounts != other.amounts and all(a <= b for a, b in zip(one.amounts, other.amounts, strict=True))


@pytest.mark.parametrize("name", ["reward_score", "actor_generate", "critic_train"])
def test_a_candidate_stays_exactly_when_nothing_like_it_beats_it(name: str) -> None:
    stage = PPO_GRAPH.by_name[name]
    limit = FACTS.cluster.usable_bytes(0)
    found = frontier(FACTS, MODEL, stage, ())
    tied = stage.name != "reward_score"
    for (_, size), kept in found.candidates.items():
        every = []
        for choice in legal_choices(FACTS, stage, size, ()):
            query = StageQuery(
                stage=stage, model=FACTS.models.spec(stage.role), layout=choice.layout, schedule=choice.schedule
            )
            candidate = cost_query(MODEL, query)
            if candidate.peak_bytes <= limit:
                every.append(candidate)
        for candidate in every:
            rivals = [o for o in every if not tied or stands_beside(o.layout, candidate.layout)]
            assert (candidate in kept) == (not any(beats(rival, candidate) for rival in rivals))


def test_every_choice_is_kept_or_counted() -> None:
    stage = PPO_GRAPH.by_name["critic_train"]
    found = frontier(FACTS, MODEL, stage, ())
    rejected: Counter[str] = Counter()
    legal = sum(len(legal_choice_table(FACTS, stage, size, (), rejected)) for _, size in found.candidates)
    kept = sum(len(candidates) for candidates in found.candidates.values())
    assert found.rejected[DOMINATED] + found.rejected[TOO_LARGE] + kept == legal
    assert found.rejected - Counter({DOMINATED: 10**9, TOO_LARGE: 10**9}) == rejected


def test_without_a_limit_nothing_is_too_large() -> None:
    assert frontier(FACTS, MODEL, PPO_GRAPH.by_name["actor_train"], (), is_limited=False).rejected[TOO_LARGE] == 0


def test_a_pin_leaves_what_agrees_with_it() -> None:
    pins = parse_pins(["critic_train.recompute=full", "critic_train.pool=2:2"], PPO_GRAPH)
    found = frontier(FACTS, MODEL, PPO_GRAPH.by_name["critic_train"], pins, is_limited=False)
    assert [str(pool) for pool in found.pools] == ["2:2"]
    assert {c.schedule.recompute.value for c in found.candidates_on(Ranks(2, 2))} == {"full"}
