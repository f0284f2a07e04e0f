from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from meshwright.cost_models.cost import Cost, Memory
from meshwright.cost_models.protocol import CostModel, QueryLoop, StageQuery, bytes_of, queries_of
from meshwright.planner.job.job import Facts, read_job, resolve
from meshwright.planner.plan.cost_queries import Choice, cost_model_of, query_for_choice
from meshwright.planner.plan.steps_ahead import search_cases, steps_ahead_patterns
from meshwright.planner.search.legal_choices import legal_choice_table
from meshwright.profiles.choice_table import ChoiceTable
from meshwright.profiles.stages import Stage
from tests.planner.jobs import (
    adapted_facts,
    critic_free_facts,
    distill_facts,
    image_facts,
    mixed_facts,
    mixture_facts,
    small_facts,
)
from tests.planner.plans import long_facts
from tests.seeds import cases

DEFERRAL = 1

MOST = 400
"""Choices of a stage that are asked for one by one."""

JOBS = {
    "small": small_facts(),
    "experts": mixture_facts(small_facts()),
    "adapted experts": adapted_facts(mixture_facts(small_facts())),
    "long": long_facts(),
    "two kinds": mixed_facts(),
    "no critic": critic_free_facts("grpo"),
    "images": image_facts(),
    "distributions": distill_facts(2, small_facts(), 8),
}

FIRST = tuple(name for name in JOBS if name != "adapted experts")


@cases("name", JOBS, few=FIRST)
def test_the_sums_of_a_layout_are_those_of_the_terms_of_each_schedule(name: str) -> None:
    facts, model = facts_and_model(name)
    for stage, choices in tables_of(facts):
        query = query_for_choice(facts, stage, Choice(*choices[0]), deferral=DEFERRAL)
        for one in [*queries_of(replace(query, max_deferral=DEFERRAL), choices)][:: max(1, len(choices) // 40)]:
            costs, memory = model.on_layout(replace(one, max_deferral=DEFERRAL)), model.memory(one)
            held = costs.bytes(one.schedule)
            assert costs.seconds(one.schedule) == pytest.approx(model.seconds(one).total, rel=1e-12)
            assert costs.tail_seconds(one.schedule) == pytest.approx(model.tail_seconds(one), rel=1e-12)
            assert held == pytest.approx(bytes_of(memory), rel=1e-12)
            assert held.weights == sum(t.amount for t in memory.resident.terms if t.name == "weights")


@cases("name", JOBS, few=FIRST)
def test_a_table_of_choices_costs_what_each_choice_costs_alone(name: str) -> None:
    facts, model = facts_and_model(name)
    num_compared = 0
    for stage, choices in tables_of(facts):
        query = query_for_choice(facts, stage, Choice(*choices[0]), deferral=DEFERRAL)
        query = replace(query, max_deferral=DEFERRAL)
        alone = AskedAlone(model)
        for together, one_by_one in (
            (model.seconds_of_choices(query, choices), alone.seconds_of_choices(query, choices)),
            (model.bytes_of_choices(query, choices), alone.bytes_of_choices(query, choices)),
        ):
            for column, expected in zip(together, one_by_one, strict=True):
                np.testing.assert_allclose(column, expected, rtol=1e-12, atol=0)
        num_compared += len(choices)
    assert num_compared > 50


EXAMPLES = Path(__file__).parents[2] / "examples"


JOB_NAMES = sorted({path.parent.name for path in EXAMPLES.glob("*/job.yaml")} - {"tiny"})
"""The examples whose models are in the repository."""


@cases("job", JOB_NAMES, few=["7b-8xa100-40gb"])
def test_a_table_of_an_example_costs_what_each_of_many_choices_costs_alone(job: str) -> None:
    """Over all examples more than 20,000 choices are compared."""
    path = EXAMPLES / job / "job.yaml"
    facts, sampled = resolve(read_job(path), path.parent), np.random.default_rng(0)
    model, num_compared = cost_model_of(facts), 0
    case = search_cases(steps_ahead_patterns(facts.graph, facts.staleness)[-1], facts.staleness)[-1]
    for stage in facts.graph.stages:
        choices = legal_choice_table(facts, stage, facts.cluster.parts[0].num_ranks, (), Counter(), search_case=case)
        if stage.generates or not len(choices):
            continue
        query = query_for_choice(facts, stage, Choice(*choices[0]), deferral=0)
        seconds, memory = model.seconds_of_choices(query, choices), model.bytes_of_choices(query, choices)
        chosen = np.isin(np.arange(len(choices)), sampled.choice(len(choices), min(len(choices), MOST), replace=False))
        alone = AskedAlone(model)
        for together, one_by_one in (
            (seconds, alone.seconds_of_choices(query, choices.filter(chosen))),
            (memory, alone.bytes_of_choices(query, choices.filter(chosen))),
        ):
            for column, expected in zip(together, one_by_one, strict=True):
                np.testing.assert_allclose(column[chosen], expected, rtol=1e-12, atol=0)
        num_compared += int(chosen.sum())
    assert num_compared > 0


@dataclass(frozen=True)
class AskedAlone(QueryLoop):
    """Asks a cost model for one choice at a time."""

    model: CostModel

    def seconds(self, query: StageQuery) -> Cost:
        return self.model.seconds(query)

    def tail_seconds(self, query: StageQuery) -> float:
        return self.model.tail_seconds(query)

    def memory(self, query: StageQuery) -> Memory:
        return self.model.memory(query)


def facts_and_model(name: str) -> tuple[Facts, CostModel]:
    facts = JOBS[name].model_copy(update={"staleness": DEFERRAL})
    return facts, cost_model_of(facts)


def tables_of(facts: Facts) -> Iterator[tuple[Stage, ChoiceTable]]:
    """Yield the legal choices of each stage on two sizes of pools, in the search case with the most choices."""
    case = search_cases(steps_ahead_patterns(facts.graph, facts.staleness)[-1], facts.staleness)[-1]
    for stage in facts.graph.stages:
        for num_ranks in {2, facts.cluster.parts[0].num_ranks}:
            choices = legal_choice_table(facts, stage, num_ranks, (), Counter(), search_case=case)
            if len(choices):
                yield stage, choices
