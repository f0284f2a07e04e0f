"""The workers that rewards on hosts get, and how long the training waits for them behind the generation.

The least that it waits is part of every hand-over from the generation, so that a bound counts it; what it waits beyond
follows from how a plan generates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np

from meshwright.cost_models.cost import Cost, Source, Term
from meshwright.planner.environment.reward_tail import (
    Seconds,
    Served,
    least_arrival_seconds,
    least_tail_seconds,
    response_ends,
    tail_at_least_seconds,
    tail_seconds,
)
from meshwright.planner.environment.rewards import HostWorkers, RewardLoad
from meshwright.planner.plan.job import Facts, Job
from meshwright.planner.plan.plan import Edge, Plan
from meshwright.profiles.environment.latency import Latencies, LatencySpec
from meshwright.profiles.errors import suggestion
from meshwright.profiles.layout import Layout
from meshwright.profiles.packing import rows_of_replicas
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import GENERATE

LATENCY, WAITING = "reward latency", "rewards under way"
"""Terms of a hand-over from the generation: of the response that ends last, and what there is besides."""

MOST_CALLS = 1024
"""That a replica has at a judge at a time."""

_WORTH = 0.01
"""Of the generation's seconds: more workers that save less are not worth theirs."""


def least_cost(facts: Facts, consumer: str) -> Cost:
    """What a stage waits at least after the generation for rewards that it reads, in seconds."""
    readers = reward_readers(facts)
    latencies = [reward.latency_seconds for reward in facts.rewards]
    seconds = least_tail_seconds([latency.resolve() for latency in latencies])
    source = Source.MEASURED if latencies and all(latency.measured for latency in latencies) else Source.ANALYTIC
    return Cost((Term(LATENCY, seconds, source),)) if consumer in readers else Cost()


def unknown_latencies(job: Job, facts: Facts) -> Iterator[str]:
    """One sentence for each reward of which nobody has said, or measured, how long a call takes."""
    for asked, planned in zip(job.rewards, facts.rewards, strict=True):
        latency = planned.latency_seconds
        if "latency_seconds" not in asked.model_fields_set and not latency.measured:
            yield (
                f"reward {asked.name}: no latency_seconds is given, and {latency.told} a call is assumed: "
                "give it, or time its calls with `meshwright profile`."
            )


def host_seconds(edge: Edge) -> float:
    """Of a hand-over, those that it waits for rewards on hosts."""
    return edge.cost.amount(LATENCY, WAITING)


def late_seconds(facts: Facts, part: int, layout: Layout, schedule: Schedule, seconds: float) -> float:
    """What readers of rewards wait at least beyond `least_cost` when the generation takes these seconds so, with the
    most workers that rewards may have."""
    rewards = [
        Served(
            _resolved(one.latency_seconds), (one.workers or _most_workers(facts, part, layout, one)) * one.batch_size
        )
        for one in facts.rewards
    ]
    ends = _response_ends(facts, layout, schedule, seconds)
    return max(0.0, tail_at_least_seconds(ends, rewards, layout.dp) - _least_seconds(facts))


def least_late_of(facts: Facts) -> Callable[[float], float]:
    """The same by the seconds of a generation, whatever else is chosen of it."""
    arrival, least = arrival_seconds(facts), _least_seconds(facts)
    return lambda seconds: max(0.0, arrival - seconds - least)


def arrival_seconds(facts: Facts) -> float:
    """Seconds from the start of a generation before which the rewards that others wait for are not all known; 0 where
    none waits."""
    if not reward_readers(facts):
        return 0.0
    latencies = [_resolved(reward.latency_seconds) for reward in facts.rewards]
    return least_arrival_seconds(latencies, facts.workload.candidates.batch_size)


def with_workers(plan: Plan, *, spare: float = _WORTH) -> Plan:
    """The plan with workers for each reward on hosts, as few as keep the training waiting no longer than the most do,
    or by a `spare` part of the generation's seconds longer, and with what it then waits."""
    facts = plan.facts
    if not facts.rewards:
        return plan
    ends = _ends(plan)
    most = [reward.workers or most_workers(plan, reward) for reward in facts.rewards]
    generation = plan.placement(GENERATE)
    enough = tail(plan, ends, most) + spare * generation.cost.total
    chosen = list(most)
    for index, reward in enumerate(facts.rewards):
        fewer = [2**k for k in range(most[index].bit_length()) if 2**k < most[index] and reward.workers is None]
        for number in (*fewer, most[index]):
            chosen[index] = number
            if tail(plan, ends, chosen) <= enough:
                break
    workers = tuple(
        HostWorkers(reward=reward.name, workers=number) for reward, number in zip(facts.rewards, chosen, strict=True)
    )
    return _with_wait(plan.model_copy(update={"workers": workers}), tail(plan, ends, chosen))


def _with_wait(plan: Plan, seconds: float) -> Plan:
    """The plan with hand-overs from the generation that wait so many seconds for rewards, where they are read."""
    readers = reward_readers(plan.facts)
    edges = tuple(
        _waiting(edge, seconds) if edge.producer == GENERATE and edge.consumer in readers else edge
        for edge in plan.edges
    )
    return plan.model_copy(update={"edges": edges})


def with_its_workers(plan: Plan) -> Plan:
    """The plan with what its readers of rewards wait with the workers that it names."""
    known = {one.reward: one.workers for one in plan.workers}
    if not plan.facts.rewards:
        return plan
    return _with_wait(plan, tail(plan, _ends(plan), [known[reward.name] for reward in plan.facts.rewards]))


def most_workers(plan: Plan, reward: RewardLoad) -> int:
    """Workers that one reward of one replica may have: its share of a host's processors, or calls at a judge."""
    return _most_workers(plan.facts, plan.part_of(GENERATE), plan.placement(GENERATE).layout, reward)


def _most_workers(facts: Facts, number: int, layout: Layout, reward: RewardLoad) -> int:
    if reward.is_remote:
        return MOST_CALLS
    part = facts.cluster.parts[number]
    hosts = -(-layout.num_ranks // part.ranks_per_node)
    replicas = -(-layout.dp // hosts)
    return max(1, part.cpus // (replicas * sum(not one.is_remote for one in facts.rewards)))


def tail(plan: Plan, ends: Seconds, workers: Sequence[int]) -> float:
    """Seconds from the last response of a step to the last of its rewards, with so many workers for each reward."""
    return tail_seconds(ends, served(plan, workers), plan.placement(GENERATE).layout.dp)


def served(plan: Plan, workers: Sequence[int]) -> list[Served]:
    """The rewards of a plan with so many workers each."""
    return [
        Served(reward.latency_seconds.resolve(), number * reward.batch_size)
        for reward, number in zip(plan.facts.rewards, workers, strict=True)
    ]


def worker_violations(plan: Plan) -> Iterator[str]:
    """Rules that the workers of a plan break."""
    named, known = [one.reward for one in plan.workers], {reward.name: reward for reward in plan.facts.rewards}
    for name in named:
        if name not in known:
            yield f"workers are given to {name!r}, which is no reward of the job; {suggestion(name, known)}"
    for name, reward in known.items():
        if named.count(name) != 1:
            yield f"the reward {name} has {named.count(name)} entries of workers; give it one."
            continue
        number, most = next(one.workers for one in plan.workers if one.reward == name), most_workers(plan, reward)
        if reward.workers is not None and number != reward.workers:
            yield f"the reward {name} has {number} workers and the job says {reward.workers}; plan the job again."
        elif reward.workers is None and number > most:
            yield f"the reward {name} has {number} workers for each replica; use {most}, all that are for it, or fewer."


def _ends(plan: Plan) -> Seconds:
    """When the responses of the fullest replica end, in seconds from the start of a turn that is all that they have.
    Sequences that run on from turn to turn end no later."""
    generation = plan.placement(GENERATE)
    return _response_ends(plan.facts, generation.layout, generation.schedule, generation.cost.total)


def _response_ends(facts: Facts, layout: Layout, schedule: Schedule, seconds: float) -> Seconds:
    workload = facts.workload.candidates
    num_rows = rows_of_replicas(workload.batch_size, layout.dp)[0]
    dealt = np.random.default_rng(0).permutation(workload.response_lengths.strata(num_rows))
    return response_ends(dealt.tolist(), schedule.generation_slots, seconds)


def _least_seconds(facts: Facts) -> float:
    """Those of `least_cost` for a stage that waits."""
    return least_tail_seconds([_resolved(reward.latency_seconds) for reward in facts.rewards])


@lru_cache(maxsize=32)  # every candidate of a generation asks for the same few
def _resolved(latency: LatencySpec) -> Latencies:
    return latency.resolve()


def reward_readers(facts: Facts) -> set[str]:
    """The stages that wait for rewards behind the generation: none where it has waited for them itself, to choose what
    is kept."""
    return set() if facts.workload.best_of or not facts.rewards else {edge.consumer for edge in facts.graph.host_edges}


def _waiting(edge: Edge, seconds: float) -> Edge:
    """The hand-over with this many seconds in all for rewards."""
    least = Cost(tuple(term for term in edge.cost.terms if term.name != WAITING))
    more = seconds - least.amount(LATENCY)
    return edge.model_copy(update={"cost": least + Cost((Term(WAITING, max(0.0, more)),))})
