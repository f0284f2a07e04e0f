"""What the processors of this machine do for a rehearsed step, and how slow a rehearsal has to be for it not to matter.

Waits take no processor; messages and the executor do, on all ranks together. The rates were measured on two cores of an
AMD EPYC with rehearsals of 7b-16xa100 (2.5 s for 842 MiB) and of long-tail-64 (5.8 s for 2244 MiB), 2026-11-21.
"""

from __future__ import annotations

import os

from meshwright.planner.plan.edges import field_bytes
from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.program import Send, lower

_SECONDS_PER_BYTE = 2.6e-9
"""Packing, the loopback's two ends, and unpacking."""
_SECONDS_PER_INSTRUCTION = 0.4e-3
"""On each rank that takes part in it: the executor, and a message besides its bytes."""
_WAITS_TO_WORK = 10.0
"""Wall seconds of a step for each second that every processor works."""
_LEAST_STEP_SECONDS = 2.0
"""Processes are late by milliseconds whatever they do, so a step is not made shorter."""


def num_processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def processor_seconds(plan: Plan) -> float:
    """Of all ranks together in one step of a rehearsal of this plan, estimated."""
    workload, instructions = plan.facts.workload, lower(plan).instructions
    num_bytes = sum(
        len(one.targets) * field_bytes(workload, field)
        for one in instructions
        if isinstance(one, Send)
        for field in one.fields
    )
    return num_bytes * _SECONDS_PER_BYTE + sum(len(one.ranks) for one in instructions) * _SECONDS_PER_INSTRUCTION


def slow_enough(plan: Plan) -> float:
    """The speed at which waits dominate: as planned at most, and faster where the processors have less to do."""
    step_seconds = max(_LEAST_STEP_SECONDS, _WAITS_TO_WORK * processor_seconds(plan) / num_processors())
    return min(1.0, step_seconds / plan.period_seconds)
