"""Rules about the replicas and schedules of vLLM where `run` starts it, beside the ranks of a CPU cluster.

On other clusters vLLM generates for another trainer, to which the plan is exported, and these rules do not apply.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.job.job import Facts
from meshwright.profiles.frameworks import VLLM
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule, WhileWaiting

MAX_PROCESSES = 8
"""The most processes that can share a model in vLLM's CPU build (csrc/cpu/shm.cpp of vLLM 0.32)."""


def generates_with_vllm(facts: Facts) -> bool:
    """True if `run` would start vLLM beside every rank that generates."""
    return facts.engine == VLLM and facts.cluster.kind == "cpu"


def keeps_sequences_in_flight(facts: Facts) -> bool:
    """True if sequences may stay in flight when the engine gets new weights.

    Between periods, vLLM drops what sequences in flight have cached and recomputes it with the new weights. A job that
    keeps the cache after a refit can therefore leave none of them in flight, except multi-turn rollouts, which give up
    their cache between periods with any engine.
    """
    recomputes = facts.cache_after_refit == "recompute" or facts.workload.turns is not None
    return recomputes or not generates_with_vllm(facts)


def engine_layout_rules(facts: Facts, layout: Layout) -> Iterator[str]:
    """Yield the rules that a layout of generation breaks with the engine of the facts."""
    if not generates_with_vllm(facts):
        return
    if layout.pp > 1:
        yield f"pp={layout.pp} shards layers, and each process of vllm has all of them on a CPU; use pp=1."
    if layout.ep > 1:
        yield f"ep={layout.ep} distributes experts, and each process of vllm has a shard of every expert; use ep=1."
    if layout.tp > MAX_PROCESSES:
        yield f"tp={layout.tp} is more than the {MAX_PROCESSES} processes of a vllm on CPUs; use tp={MAX_PROCESSES}."


def engine_schedule_rules(facts: Facts, schedule: Schedule) -> Iterator[str]:
    """Yield the rules that the schedule of any stage breaks with the engine of the facts."""
    if not generates_with_vllm(facts):
        return
    if facts.workload.turns and schedule.generation_slots and schedule.while_waiting is WhileWaiting.KEEP:
        yield (
            f"while_waiting={WhileWaiting.KEEP} with engine vllm, where a sequence that waits gives up its slot; "
            f"use {WhileWaiting.LEAVE}."
        )
    if not keeps_sequences_in_flight(facts):
        yield from _deferral_rules(schedule)


def _deferral_rules(schedule: Schedule) -> Iterator[str]:
    plain = Schedule()
    for name in ("batches_in_flight", "overcommit"):
        if getattr(schedule, name) != getattr(plain, name):
            yield (
                f"{name}={getattr(schedule, name)} with engine vllm, which recomputes what sequences in flight have "
                f"cached; give cache_after_refit: recompute, or use {getattr(plain, name)}."
            )
