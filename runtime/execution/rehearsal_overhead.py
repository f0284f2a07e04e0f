"""Processor time of a rehearsed step, and the speed of a rehearsal at which it does not matter.

Waits take no processor time; messages and the executor do, on all ranks together. The rates were measured on two cores
of an AMD EPYC with rehearsals of 7b-16xa100 (2.5 s for 842 MiB) and of long-tail-64 (5.8 s for 2244 MiB), 2026-11-21.
"""

from __future__ import annotations

import os

from meshwright.planner.plan.edges import field_bytes
from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.program import Send, lower

_SECONDS_PER_BYTE = 2.6e-9
"""Packing, both ends of the loopback, and unpacking."""
_SECONDS_PER_INSTRUCTION = 0.4e-3
"""Executor and fixed cost of a message, on each rank that takes part."""
_WAITS_TO_WORK = 10.0
"""Wall seconds of a step for each second that every processor works."""
_MIN_STEP_SECONDS = 2.0
"""Shortest step: processes are always late by milliseconds."""


def num_processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def processor_seconds(plan: Plan) -> float:
    """Estimate the processor seconds of all ranks together in one rehearsed step."""
    workload, instructions = plan.facts.workload, lower(plan).instructions
    num_bytes = sum(
        len(one.targets) * field_bytes(workload, field)
        for one in instructions
        if isinstance(one, Send)
        for field in one.fields
    )
    return num_bytes * _SECONDS_PER_BYTE + sum(len(one.ranks) for one in instructions) * _SECONDS_PER_INSTRUCTION


def default_speed(plan: Plan) -> float:
    """Return the smallest multiplier of waits at which waits still dominate the processors' work; 1 at most."""
    step_seconds = max(_MIN_STEP_SECONDS, _WAITS_TO_WORK * processor_seconds(plan) / num_processors())
    return min(1.0, step_seconds / plan.period_seconds)
