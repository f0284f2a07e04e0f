"""Random legal plans without a search: any pool, layout and schedule for a stage, in any order its edges allow."""

from __future__ import annotations

import random
from dataclasses import replace

from meshwright.cost_models.protocol import CostModel
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import Choice, stage_transfers
from meshwright.planner.plan.evaluate import refit_name
from meshwright.planner.plan.layout_and_schedule_rules import rows_per_update
from meshwright.planner.plan.pins import Ranks
from meshwright.planner.plan.plan import Plan, Solver
from meshwright.planner.plan.pool_rules import overlap_violations
from meshwright.planner.plan.steps_ahead import SearchCase, StepsAhead, synchronous
from meshwright.planner.search.assemble import Origin, Pick, assemble
from meshwright.planner.search.legal_choices import legal_choices, pools
from meshwright.profiles.hardware import replicas_of_parts
from meshwright.profiles.stages import GENERATE, Stage, StageGraph
from tests.planner.jobs import RandomModel, small_facts

_PINNED = Solver(
    name="none",
    version="0",
    seed=0,
    num_workers=1,
    max_deterministic_time=0.0,
    status="pinned",
    objective_seconds=1.0,
    bound_seconds=0.0,
    gap=1.0,
)


def long_facts() -> Facts:
    """Facts whose responses are long enough to be read in chunks."""
    return small_facts(memory_bytes=2**50, response=400)


def random_plan(
    seed: int,
    facts: Facts | None = None,
    model: CostModel | None = None,
    ahead: StepsAhead | None = None,
    deferral: int = 0,
) -> Plan:
    """A plan that breaks no rule, drawn from a seed. Memory is not looked at.

    The bound on the staleness leaves sequences `deferral` turns beyond their first.
    """
    facts = facts or small_facts(memory_bytes=2**50)
    ahead = ahead or synchronous(facts.graph)
    facts = facts.model_copy(update={"staleness": ahead[GENERATE] + deferral})
    model = model or RandomModel(seed, memory_scale=1.0)
    draw, scope = random.Random(seed), SearchCase(ahead=ahead, keeps_in_flight=deferral > 0)
    plan = assemble(
        facts,
        model,
        transfers=stage_transfers(facts, model),
        picks=_picks(draw, facts, scope),
        order=_order(draw, facts.graph, ahead),
        origin=Origin(digests=facts.digests(), pins=(), solver=_PINNED),
        ahead=ahead,
    )
    solver = plan.solver.model_copy(update={"objective_seconds": plan.period_seconds})
    return plan.model_copy(update={"solver": solver})


def _picks(draw: random.Random, facts: Facts, scope: SearchCase) -> dict[str, Pick]:
    """A pool, layout and schedule for each stage; the pools do not cross."""
    picks: dict[str, Pick] = {}
    for stage in facts.graph.stages:
        taken = [pick.ranks.ranks for pick in picks.values()]
        legal = [
            ranks
            for ranks in pools(facts, stage, ())
            if not any(overlap_violations(ranks.ranks, other) for other in taken)
        ]
        while stage.name not in picks:  # some pools leave a stage no layout, such as 7 ranks for 4 rows
            ranks = draw.choice(legal)
            part = facts.cluster.part_of_pool(ranks.ranks)
            if choices := list(legal_choices(facts, stage, ranks.num_ranks, (), part=part, search_case=scope)):
                picks[stage.name] = _pick(draw, facts, stage, ranks, draw.choice(choices))
    return picks


def _pick(draw: random.Random, facts: Facts, stage: Stage, ranks: Ranks, choice: Choice) -> Pick:
    part = facts.cluster.part_of_pool(ranks.ranks)
    if len(facts.cluster.parts_of(part)) == 1:
        return Pick(ranks, choice)
    every, layout = rows_per_update(facts, stage), choice.layout
    first, other = replicas_of_parts(facts.cluster, part, layout.num_ranks // layout.dp)
    mine = draw.randint(first, every - other)
    return Pick(ranks, replace(choice, schedule=replace(choice.schedule, rows=(mine, every - mine))))


def _order(draw: random.Random, graph: StageGraph, ahead: StepsAhead) -> tuple[str, ...]:
    """Stages after what they read in their own turn, each refit somewhere before its stage."""
    before = {
        name: {
            *(edge.producer for edge in graph.edges if edge.consumer == name and ahead[edge.producer] == ahead[name]),
            *(refit_name(target) for target in graph.refit_targets if name in graph.refit_readers(target)),
        }
        for name in graph.names
    }
    before |= {refit_name(name): set() for name in graph.names}
    order: list[str] = []
    while before:
        ready = sorted(name for name, needed in before.items() if needed <= set(order))
        order.append(draw.choice(ready))
        del before[order[-1]]
    return tuple(order)
