"""What is left out of a site takes no less of anything than what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest

from meshwright.cost_models.cost import WEIGHTS
from meshwright.cost_models.protocol import Bytes, LayoutCosts
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import Choice, query_for_choice
from meshwright.planner.plan.layout_and_schedule_rules import available_bytes
from meshwright.planner.plan.steps_ahead import SearchCase, max_deferral, search_cases, steps_ahead_patterns
from meshwright.planner.proof.site_choices import Allowance, ParetoFront, group_by_family
from meshwright.planner.proof.space import Enumeration, Site
from meshwright.planner.search.frontiers import kinds_of
from meshwright.planner.search.legal_choices import legal_choices
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Stage
from tests.planner.proofs import JOBS, enumeration


@pytest.mark.parametrize("name", ["small", "experts", "long", "three nodes"])
def test_no_schedule_of_a_site_takes_less_of_something_than_all_that_are_kept(name: str) -> None:
    facts = JOBS[name].model_copy(update={"staleness": 1})
    every = enumeration(facts)
    for scope in (scope for ahead in steps_ahead_patterns(PPO_GRAPH, 1) for scope in search_cases(ahead, 1)):
        space = every.space(scope)
        for stage in PPO_GRAPH.stages:
            kept = space.choices[stage.name]
            of_site = {site: kept.amounts[:6, kept.site == number] for site, number in every.sites.items()}
            for (part, layout), schedule in choices_by_the_rules(facts, stage, scope):
                amounts = amounts_of(every, stage, Choice(layout, schedule), scope, part)
                rows = of_site[Site(part, layout)] if amounts else np.zeros((6, 0))
                beats = (rows <= np.array(amounts or [0.0] * 6)[:, np.newaxis]).all(axis=0)
                assert amounts is None or beats.any(), (stage.name, layout, schedule)


class Shrinking:
    """Costs of a stage whose larger micro-batches take less memory."""

    def bytes(self, schedule: Schedule) -> Bytes:
        return Bytes(0.0, 0.0, 10.0 / schedule.micro_batch_size, 0.0)

    def seconds(self, schedule: Schedule) -> float:
        return 1.0 / schedule.micro_batch_size


def test_a_schedule_that_fits_is_kept_where_smaller_ones_do_not() -> None:
    """More at a time was believed to take no less memory, which no law says: what came behind was in no case."""
    front = ParetoFront(
        num_ranks=1,
        may_share_weights=False,
        max_period_seconds=10.0,
        allowance=Allowance(10.0, 10.0),
        costs=cast(LayoutCosts, Shrinking()),
        least=lambda _: 0.0,
        fits=lambda held: held.peak <= 5.0,
    )
    for family in group_by_family(Schedule(micro_batch_size=size) for size in (1, 2, 4)):
        front.add(family)
    assert [row[0] for row in front.rows] == [0.5, 0.25]


def choices_by_the_rules(facts: Facts, stage: Stage, scope: SearchCase) -> Iterator[tuple[Site, Schedule]]:
    """By the rules alone."""
    for kind in set(kinds_of(facts, stage, ()).values()):
        for choice in legal_choices(facts, stage, kind.num_ranks, (), part=kind.part, search_case=scope):
            yield Site(kind.part, choice.layout), choice.schedule


def amounts_of(every: Enumeration, stage: Stage, choice: Choice, scope: SearchCase, part: int) -> list[float] | None:
    """The ranks and plain amounts of a choice that fits, each asked of the cost model by itself."""
    deferral = max_deferral(scope.ahead, every.facts.staleness)
    call = query_for_choice(every.facts, stage, choice, deferral=deferral, part=part)
    memory, (device_bytes, host_bytes) = every.model.memory(call), available_bytes(every.facts, part)
    if memory.resident.total + memory.transient.total > device_bytes or memory.host.total > host_bytes:
        return None
    seconds, tail = every.model.seconds(call).total, every.model.tail_seconds(call)
    weights = memory.resident.amount(WEIGHTS) if stage.may_share else 0.0
    own = memory.resident.total - weights
    rounded = (amount * (1 + 1e-12) for amount in (seconds, tail, own, weights, memory.transient.total))
    return [float(choice.layout.num_ranks), *rounded]
