"""Layouts that the rules allow are enumerated twice, and come out the same."""

from __future__ import annotations

from collections import Counter

import pytest

from meshwright.planner.plan.layout_and_schedule_rules import schedules
from meshwright.planner.proof.site_choices import group_by_family, legal_layouts
from meshwright.planner.search.frontiers import kinds_of
from meshwright.planner.search.legal_choices import legal_choice_table
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.layout import Layout
from tests.planner.jobs import small_facts
from tests.planner.proofs import JOBS


@pytest.mark.parametrize("name", JOBS)
def test_the_layouts_are_those_that_the_search_finds_legal(name: str) -> None:
    facts = JOBS[name]
    for stage in PPO_GRAPH.stages:
        for kind in set(kinds_of(facts, stage, ()).values()):
            found = legal_choice_table(facts, stage, kind.num_ranks, (), Counter(), part=kind.part)
            legal = list(legal_layouts(facts, stage, kind.num_ranks, kind.part))
            assert len(legal) == len(set(legal))
            assert set(legal) == set(found.layouts)


def test_a_family_has_its_smaller_schedules_first_and_all_that_there_are() -> None:
    facts, stage = small_facts(), PPO_GRAPH.by_name["actor_train"]
    every = schedules(facts, stage, Layout(dp=2))
    families = group_by_family(every)
    assert {one for family in families for one, _ in family.members} == set(every)
    longest = facts.workload.max_tokens
    for family in families:
        sizes = [one.max_tokens(longest) for one, _ in family.members]
        assert sizes == sorted(sizes)
