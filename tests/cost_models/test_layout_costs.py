from collections import Counter
from dataclasses import replace

import pytest

from meshwright.cost_models.blended import cost_model
from meshwright.cost_models.protocol import CostModel
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import Choice, query_for_choice
from meshwright.planner.plan.steps_ahead import max_deferral, search_cases, steps_ahead_patterns
from meshwright.planner.search.legal_choices import legal_choices_by_layout
from meshwright.profiles.stages import Stage
from tests.planner.jobs import critic_free_facts, mixed_facts, mixture_facts, small_facts
from tests.planner.plans import long_facts

JOBS = {
    "small": small_facts(),
    "experts": mixture_facts(small_facts()),
    "long": long_facts(),
    "two kinds": mixed_facts(),
    "no critic": critic_free_facts("grpo"),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_sums_of_a_layout_are_those_of_the_terms_of_each_schedule(name: str) -> None:
    facts = JOBS[name].model_copy(update={"staleness": 1})
    model = cost_model(facts.cluster, facts.workload, facts.precision)
    for stage in facts.graph.stages:
        for num_ranks in (2, facts.cluster.parts[0].num_ranks):
            assert_sums_are_those_of_the_terms(facts, model, stage, num_ranks)


def assert_sums_are_those_of_the_terms(facts: Facts, model: CostModel, stage: Stage, num_ranks: int) -> None:
    ahead = steps_ahead_patterns(facts.graph, facts.staleness)[-1]
    scope, deferral = search_cases(ahead, facts.staleness)[-1], max_deferral(ahead, facts.staleness)
    asked = 0
    for layout, schedules in legal_choices_by_layout(facts, stage, num_ranks, (), Counter(), search_case=scope):
        any_of_them = query_for_choice(facts, stage, Choice(layout, schedules[0]), deferral=deferral)
        costs = model.on_layout(replace(any_of_them, max_deferral=deferral))
        for schedule in schedules[:: max(1, len(schedules) // 8)]:
            call = query_for_choice(facts, stage, Choice(layout, schedule), deferral=deferral)
            memory, held = model.memory(call), costs.bytes(schedule)
            assert costs.seconds(schedule) == model.seconds(call).total
            assert costs.tail_seconds(schedule) == model.tail_seconds(call)
            assert (held.resident, held.transient) == (memory.resident.total, memory.transient.total)
            assert held.host == memory.host.total
            assert held.weights == sum(t.amount for t in memory.resident.terms if t.name == "weights")
            asked += 1
    assert asked
