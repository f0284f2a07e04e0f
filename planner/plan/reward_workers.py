"""The workers of rewards that run on hosts, and the time that training waits for them after the generation.

The wait without queueing for workers is part of the cost of every transfer from the generation, so that lower bounds
include it. The rest of the wait depends on how a plan generates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np

from meshwright.cost_models.cost import Cost, Source, Term
from meshwright.planner.job.job import Facts
from meshwright.planner.job.reward_tail import (
    RewardWorkers,
    SecondsArray,
    arrival_lower_bound_seconds,
    response_ends,
    tail_lower_bound_seconds,
    tail_seconds,
    unqueued_tail_seconds,
)
from meshwright.planner.job.rewards_and_tools import HostWorkers, RewardLoad
from meshwright.planner.plan.plan import Edge, Plan
from meshwright.profiles.environment.latency import Latencies, LatencySpec
from meshwright.profiles.errors import suggestion
from meshwright.profiles.layout import Layout
from meshwright.profiles.packing import rows_per_replica
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import GENERATE

LATENCY, UNDER_WAY = "reward latency", "rewards under way"
"""Cost terms of a transfer from the generation: the mean latency of the slowest reward, for which the response that
ends last waits, and the further wait for calls that are then still under way: queued ones, and longer ones."""

MAX_JUDGE_CALLS = 1024
"""Maximum number of concurrent calls of a replica to a judge."""

_WAIT_TOLERANCE = 0.01
"""The share of the generation's seconds by which rewards may take longer than with the maximum number of workers."""


def min_reward_wait(facts: Facts, consumer: str) -> Cost:
    """The seconds that a stage waits after the generation for rewards that it reads, if no call is queued."""
    readers = reward_readers(facts)
    latencies = [reward.latency_seconds for reward in facts.rewards]
    seconds = unqueued_tail_seconds([latency.resolve() for latency in latencies])
    source = Source.MEASURED if latencies and all(latency.measured for latency in latencies) else Source.ANALYTIC
    return Cost((Term(LATENCY, seconds, source),)) if consumer in readers else Cost()


def host_seconds(edge: Edge) -> float:
    """The seconds of a transfer that are spent waiting for rewards on hosts."""
    return edge.cost.amount(LATENCY, UNDER_WAY)


def extra_reward_wait_seconds(facts: Facts, part: int, layout: Layout, schedule: Schedule, seconds: float) -> float:
    """A lower bound on the wait of readers of rewards beyond `min_reward_wait`, in seconds.

    The generation runs on part `part` of the cluster with this layout and schedule and takes `seconds`; rewards have
    the maximum number of workers.
    """
    rewards = [
        RewardWorkers(
            latencies=_resolved(one.latency_seconds),
            concurrency=(one.workers or _max_workers(facts, part, layout, one)) * one.batch_size,
        )
        for one in facts.rewards
    ]
    ends = _response_ends(facts, layout, schedule, seconds)
    return max(0.0, tail_lower_bound_seconds(ends, rewards, layout.dp) - _min_wait_seconds(facts))


def extra_reward_wait_bound(facts: Facts) -> Callable[[float], float]:
    """A function from the seconds of a generation to a lower bound of `extra_reward_wait_seconds` for any layout and
    schedule."""
    arrival, min_wait = earliest_reward_seconds(facts), _min_wait_seconds(facts)
    return lambda seconds: max(0.0, arrival - seconds - min_wait)


def earliest_reward_seconds(facts: Facts) -> float:
    """Seconds from the start of a generation to the earliest time when all rewards are known; 0 if no stage waits for
    them."""
    if not reward_readers(facts):
        return 0.0
    latencies = [_resolved(reward.latency_seconds) for reward in facts.rewards]
    return arrival_lower_bound_seconds(latencies, facts.workload.candidates.batch_size)


def with_workers(plan: Plan, *, wait_tolerance: float = _WAIT_TOLERANCE) -> Plan:
    """Return the plan with the number of workers of each reward on hosts, and the wait for them.

    The wait may exceed that with the maximum number of workers by at most `wait_tolerance` times the seconds of the
    generation. Within that the rewards, one after another, have as few workers as possible, in powers of 2.
    """
    facts = plan.facts
    if not facts.rewards:
        return plan
    ends = _planned_response_ends(plan)
    max_workers = [reward.workers or max_workers_of(plan, reward) for reward in facts.rewards]
    generation = plan.placement(GENERATE)
    longest_tail = reward_tail_of(plan, ends, max_workers) + wait_tolerance * generation.cost.total
    chosen = list(max_workers)
    # Greedy: each reward in turn takes the smallest power of 2, or the maximum, while later ones have their maximum.
    for index, reward in enumerate(facts.rewards):
        fewer = [
            2**k for k in range(max_workers[index].bit_length()) if 2**k < max_workers[index] and reward.workers is None
        ]
        for number in (*fewer, max_workers[index]):
            chosen[index] = number
            if reward_tail_of(plan, ends, chosen) <= longest_tail:
                break
    workers = tuple(
        HostWorkers(reward=reward.name, workers=number) for reward, number in zip(facts.rewards, chosen, strict=True)
    )
    return _with_wait(plan.model_copy(update={"workers": workers}), reward_tail_of(plan, ends, chosen))


def _with_wait(plan: Plan, seconds: float) -> Plan:
    """The plan with this wait for rewards in its transfers from the generation to readers of rewards."""
    readers = reward_readers(plan.facts)
    edges = tuple(
        _waiting(edge, seconds) if edge.producer == GENERATE and edge.consumer in readers else edge
        for edge in plan.edges
    )
    return plan.model_copy(update={"edges": edges})


def with_recorded_workers(plan: Plan) -> Plan:
    """The plan with the wait for rewards that follows from its own numbers of workers."""
    workers = {one.reward: one.workers for one in plan.workers}
    if not plan.facts.rewards:
        return plan
    return _with_wait(
        plan,
        reward_tail_of(plan, _planned_response_ends(plan), [workers[reward.name] for reward in plan.facts.rewards]),
    )


def max_workers_of(plan: Plan, reward: RewardLoad) -> int:
    """The maximum number of workers of one reward for one replica: its share of a host's processors, or concurrent
    calls to a judge."""
    return _max_workers(plan.facts, plan.part_of(GENERATE), plan.placement(GENERATE).layout, reward)


def _max_workers(facts: Facts, part: int, layout: Layout, reward: RewardLoad) -> int:
    if reward.is_remote:
        return MAX_JUDGE_CALLS
    cluster = facts.cluster.parts[part]
    hosts = -(-layout.num_ranks // cluster.ranks_per_node)
    replicas = -(-layout.dp // hosts)
    return max(1, cluster.cpus // (replicas * sum(not one.is_remote for one in facts.rewards)))


def reward_tail_of(plan: Plan, ends: SecondsArray, workers: Sequence[int]) -> float:
    """Seconds from the end of the last response of a step to its last reward, with these workers for each reward."""
    return tail_seconds(ends, served_rewards(plan, workers), plan.placement(GENERATE).layout.dp)


def served_rewards(plan: Plan, workers: Sequence[int]) -> list[RewardWorkers]:
    """The rewards of a plan with these numbers of workers."""
    return [
        RewardWorkers(latencies=reward.latency_seconds.resolve(), concurrency=number * reward.batch_size)
        for reward, number in zip(plan.facts.rewards, workers, strict=True)
    ]


def worker_violations(plan: Plan) -> Iterator[str]:
    """Rules that the workers of a plan break."""
    named, rewards = [one.reward for one in plan.workers], {reward.name: reward for reward in plan.facts.rewards}
    for name in named:
        if name not in rewards:
            yield f"workers are given to {name!r}, which is not a reward of the job; {suggestion(name, rewards)}"
    for name, reward in rewards.items():
        if named.count(name) != 1:
            yield f"the reward {name} has {named.count(name)} entries of workers; give it one."
            continue
        number, max_workers = (
            next(one.workers for one in plan.workers if one.reward == name),
            max_workers_of(plan, reward),
        )
        if reward.workers is not None and number != reward.workers:
            yield f"the reward {name} has {number} workers and the job says {reward.workers}; plan the job again."
        elif reward.workers is None and number > max_workers:
            yield (
                f"the reward {name} has {number} workers for each replica; use at most {max_workers}, its share of the "
                "host."
            )


def _planned_response_ends(plan: Plan) -> SecondsArray:
    """End times of the responses of the fullest replica, in seconds from the start of a period in which all of them
    start and end. Sequences that stay in flight across periods end no later."""
    generation = plan.placement(GENERATE)
    return _response_ends(plan.facts, generation.layout, generation.schedule, generation.cost.total)


def _response_ends(facts: Facts, layout: Layout, schedule: Schedule, seconds: float) -> SecondsArray:
    workload = facts.workload.candidates  # all samples are scored, also those that best-of-n then drops
    num_rows = rows_per_replica(workload.batch_size, layout.dp)[0]
    lengths = np.random.default_rng(0).permutation(workload.response_lengths.stratified_sample(num_rows))
    return response_ends(lengths.tolist(), schedule.generation_slots, seconds)


def _min_wait_seconds(facts: Facts) -> float:
    """The seconds of `min_reward_wait` for a stage that reads rewards."""
    return unqueued_tail_seconds([_resolved(reward.latency_seconds) for reward in facts.rewards])


@lru_cache(maxsize=32)  # every candidate generation uses the same few latencies
def _resolved(latency: LatencySpec) -> Latencies:
    return latency.resolve()


def reward_readers(facts: Facts) -> set[str]:
    """The stages that wait for rewards after the generation. There are none with best-of-n, where the generation
    itself waits for rewards to select the best samples."""
    return set() if facts.workload.best_of or not facts.rewards else {edge.consumer for edge in facts.graph.host_edges}


def _waiting(edge: Edge, seconds: float) -> Edge:
    """The transfer with this total wait for rewards."""
    unqueued = Cost(tuple(term for term in edge.cost.terms if term.name != UNDER_WAY))
    queueing_seconds = seconds - unqueued.amount(LATENCY)
    return edge.model_copy(update={"cost": unqueued + Cost((Term(UNDER_WAY, max(0.0, queueing_seconds)),))})
