"""The checker enumerates for itself what a stage may choose: as much as the search has, and at the same price."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.planner.plan.steps_ahead import search_cases, steps_ahead_patterns
from meshwright.planner.proof.cases import Case
from meshwright.planner.proof.space import AMOUNTS
from meshwright.planner.search.frontiers import frontier
from meshwright.profiles.algorithms import PPO_GRAPH
from tests.planner.proofs import JOBS, enumeration


@pytest.mark.parametrize("name", JOBS)
def test_of_what_the_search_keeps_the_checker_has_as_good_a_choice_at_the_same_price(name: str) -> None:
    """Within rounding: of choices that stream and cost the same it may keep another."""
    facts = JOBS[name]
    every = enumeration(facts)
    scope = search_cases(steps_ahead_patterns(PPO_GRAPH, 0)[0], 0)[0]
    found = every.space(scope)
    for stage in PPO_GRAPH.stages:
        rows = dict(zip(AMOUNTS, found.choices[stage.name].amounts, strict=True))
        peaks, exact = rows["own"] + rows["weights"] + rows["transient"], 1 + 1e-12
        for kind, kept in frontier(facts, every.model, stage, (), search_case=scope).candidates.items():
            for candidate in kept:
                as_good = (
                    (peaks <= candidate.peak_bytes * exact)
                    & (rows["seconds"] <= candidate.seconds * exact)
                    & (rows["tail_seconds"] <= candidate.tail_seconds * exact)
                    & (rows["ranks"] == kind.num_ranks)
                )
                assert as_good.any(), (stage.name, candidate.layout, candidate.schedule)
                if not candidate.schedule.chunk_tokens:
                    at_the_price = np.isclose(rows["seconds"][as_good], candidate.seconds, rtol=1e-12)
                    assert at_the_price.any(), (stage.name, candidate.layout, candidate.schedule)


@pytest.mark.parametrize("name", ["small", "long", "two kinds"])
def test_what_is_left_out_of_a_turn_makes_every_plan_longer(name: str) -> None:
    facts = JOBS[name]
    scope = search_cases(steps_ahead_patterns(PPO_GRAPH, 0)[0], 0)[0]
    every = enumeration(facts).space(scope)
    whole = Case.whole(every)
    most = 1.5 * whole.least_seconds()
    left = enumeration(facts, most).space(scope)
    for stage in PPO_GRAPH.names:
        kept = {tuple(amounts) for amounts in left.choices[stage].amounts.T}
        dropped = [n for n, amounts in enumerate(every.choices[stage].amounts.T) if tuple(amounts) not in kept]
        case = replace(
            whole, remaining={**whole.remaining, stage: every.choices[stage].subset(np.array(dropped, dtype=np.int64))}
        )
        assert case.is_empty or case.least_seconds() >= most * (1 - 1e-9), stage
    assert sum(len(c.site) for c in left.choices.values()) < sum(len(c.site) for c in every.choices.values())


@pytest.mark.parametrize("name", ["small", "experts", "two kinds"])
def test_choices_of_shorter_periods_are_those_of_a_new_enumeration(name: str) -> None:
    facts = JOBS[name].model_copy(update={"staleness": 1})
    scopes = [scope for ahead in steps_ahead_patterns(PPO_GRAPH, 1) for scope in search_cases(ahead, 1)]
    most = Case.whole(enumeration(facts).space(scopes[0])).least_seconds()
    longer = enumeration(facts, 2 * most)
    longer.spaces(scopes)
    shorter = longer.of_shorter_periods(1.3 * most).spaces(scopes)
    for one, other in zip(shorter, enumeration(facts, 1.3 * most).spaces(scopes), strict=True):
        assert Case.whole(one).least_seconds() == Case.whole(other).least_seconds()
        for stage in PPO_GRAPH.names:
            assert np.array_equal(one.choices[stage].amounts, other.choices[stage].amounts), stage
