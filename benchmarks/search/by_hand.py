"""Plans as other systems lay them out, each the best of its kind: what their users leave open is searched exactly.

None of them streams, and all are synchronous, as those systems are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import permutations

from meshwright.cost_models.protocol import CostModel, StageQuery
from meshwright.planner.compile import best_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.layout_and_schedule_rules import layout_rules
from meshwright.planner.plan.pins import Pin, Ranks
from meshwright.planner.plan.plan import Plan
from meshwright.planner.solver.result import Limits
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.layout import Layout, divisors
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Role

LIMITS = Limits(max_deterministic_time=10.0, gap=0.001)

WHOLE_BATCHES = tuple(
    Pin(stage.name, "chunk_tokens", 0) for stage in PPO_GRAPH.stages if not stage.generates and not stage.trains
)
"""No stage reads a response that is still being generated."""

_SPLIT = {
    "actor_generate": 0,
    "actor_logprob": 1,
    "actor_train": 1,
    "ref_logprob": 1,
    "critic_value": 2,
    "critic_train": 2,
    "reward_score": 2,
}
"""The pool of each stage: generation, actor with reference, critic with reward model."""


def synchronous(facts: Facts) -> Facts:
    return facts.model_copy(update={"staleness": 0})


def single_layout(facts: Facts, model: CostModel) -> Plan | None:
    """DeepSpeed-Chat's way: one pool, one tp x pp x dp for all stages, one stage after another."""
    return _best(facts, model, (_on_all_ranks(facts, dict.fromkeys(PPO_GRAPH.roles, one)) for one in _layouts(facts)))


def split(facts: Facts, model: CostModel) -> Plan | None:
    """OpenRLHF's way: generation, actor with reference, and critic with reward model on pools of their own.

    One of the three has half of the ranks and the others a quarter each, whichever is best.
    """
    num_ranks = facts.cluster.num_ranks
    sizes = sorted(set(permutations((num_ranks // 2, num_ranks // 4, num_ranks // 4))), reverse=True)
    return _best(facts, model, (_split_pins(split) for split in sizes if num_ranks % 4 == 0))


def co_located(facts: Facts, model: CostModel) -> Plan | None:
    """verl's default: every stage on all ranks, each with the layout that suits it."""
    whole = Ranks(0, facts.cluster.num_ranks)
    return _best(facts, model, [tuple(Pin(stage.name, "pool", whole) for stage in PPO_GRAPH.stages)])


def heuristic(facts: Facts, model: CostModel) -> Plan | None:
    """ReaL's plan by hand: every stage on all ranks, laid out by Megatron-LM's rules of thumb, role by role.

    A model is cut no further than it must be: by tp inside a node first, then by pp; dp takes the rest. While there is
    no room, the role that holds most bytes on a rank is cut once more.
    """
    cuts = {role: _megatron(facts, role) for role in PPO_GRAPH.roles}
    chosen = dict.fromkeys(PPO_GRAPH.roles, 0)
    while True:
        layouts = {role: cuts[role][chosen[role]] for role in PPO_GRAPH.roles}
        plan = _best(facts, model, [_on_all_ranks(facts, layouts)])
        if plan is not None:
            return plan
        left = [role for role in PPO_GRAPH.roles if chosen[role] + 1 < len(cuts[role])]
        if not left:
            return None
        chosen[max(left, key=lambda role: _held_bytes(facts, model, role, layouts[role]))] += 1


def _best(facts: Facts, model: CostModel, choices: Iterable[tuple[Pin, ...]]) -> Plan | None:
    """The fastest of the best plans under each choice of pins."""
    found = (best_plan(synchronous(facts), model, pins=(*WHOLE_BATCHES, *pins), limits=LIMITS) for pins in choices)
    return min((plan for plan in found if isinstance(plan, Plan)), key=lambda plan: plan.period_seconds, default=None)


def _split_pins(sizes: tuple[int, ...]) -> tuple[Pin, ...]:
    """The largest pool comes first, so that each begins at a multiple of its size."""
    first_ranks, first = {}, 0
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        first_ranks[index] = first
        first += sizes[index]
    return tuple(Pin(stage, "pool", Ranks(first_ranks[pool], sizes[pool])) for stage, pool in _SPLIT.items())


def _on_all_ranks(facts: Facts, layouts: Mapping[Role, Layout]) -> tuple[Pin, ...]:
    """Generation has no sequence parallelism, whatever the other stages have."""
    whole = Ranks(0, facts.cluster.num_ranks)
    pins = [Pin(stage.name, "pool", whole) for stage in PPO_GRAPH.stages]
    for stage in PPO_GRAPH.stages:
        layout = layouts[stage.role]
        mine = Layout(layout.tp, layout.pp, layout.dp) if stage.generates else layout
        pins.append(Pin(stage.name, "layout", mine))
    return tuple(pins)


def _layouts(facts: Facts) -> Iterator[Layout]:
    """The layouts of all ranks that are legal for every stage."""
    num_ranks = facts.cluster.num_ranks
    for tp in divisors(num_ranks):
        for pp in divisors(num_ranks // tp):
            for sp in (False, True)[: 2 if tp > 1 else 1]:
                layout = Layout(tp, pp, num_ranks // (tp * pp), sp)
                if not any(layout_rules(facts, stage, layout) for stage in PPO_GRAPH.stages if not stage.generates):
                    yield layout


def _megatron(facts: Facts, role: Role) -> tuple[Layout, ...]:
    """Layouts of all ranks that are legal for a role, from the least cut to the most."""
    cluster = facts.cluster
    cuts = ((min(cut, cluster.ranks_per_node), cut) for cut in divisors(cluster.num_ranks))
    layouts = (Layout(tp, cut // tp, cluster.num_ranks // cut) for tp, cut in cuts if cut % tp == 0)
    stages = [stage for stage in PPO_GRAPH.stages if stage.role is role]
    return tuple(one for one in layouts if not any(layout_rules(facts, stage, one) for stage in stages))


def _held_bytes(facts: Facts, model: CostModel, role: Role, layout: Layout) -> float:
    """Resident bytes of a role on a rank under one layout."""
    stages = [stage for stage in PPO_GRAPH.stages if stage.role is role]
    calls = (
        StageQuery(
            stage=stage, model=facts.models.spec(role), layout=layout, schedule=Schedule(generation_slots=layout.pp)
        )
        for stage in stages
    )
    return max(model.memory(query).resident.total for query in calls)
