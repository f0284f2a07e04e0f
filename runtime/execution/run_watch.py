"""The watchdog contexts of one rank of a run: instructions, and what ranks do together between periods."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from meshwright.cost_models.waves import processes_all_samples
from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.deadlines import Deadlines, max_waves_ratio
from meshwright.planner.program.program import Instruction
from meshwright.runtime.execution.watchdog import Watchdog
from meshwright.runtime.launch import failing

_MEETING_SECONDS = 1800.0
"""Deadline of work that no plan predicts: a checkpoint takes this long only if something hangs."""


class RunWatch:
    """Starts the watchdog of this rank and gives it deadlines.

    Collective over the world. All ranks pass the same `began`, which no other run of these processes has.
    """

    def __init__(self, plan: Plan, out: Path, start_seconds: float, *, timeout_seconds: float = 0.0) -> None:
        """`away_seconds` are added to the deadlines that follow from the plan and from measured periods."""
        self._deadlines = Deadlines(plan, timeout_seconds)
        self._batch_size = plan.facts.workload.batch_size
        # Ranks that see waves run each as instructions of its own; the others wait in one until all are sampled.
        self._default_factor = 1.0 if dist.get_rank() in _wave_ranks(plan) else max_waves_ratio(plan)
        self._deadline_factor = self._default_factor
        store = PrefixStore(f"watch/{start_seconds}", _get_default_store())
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self._watchdog = Watchdog(store, out, rank=rank, num_ranks=num_ranks, end=failing.end_process)

    def instruction(self, instruction: Instruction, place: int, period: int, step: int) -> AbstractContextManager[None]:
        """Context in which an instruction runs; `place` is its index in the program."""
        allowed = self._deadline_factor * self._deadlines.allowed_seconds()
        return self._watchdog.doing(f"{instruction.name} of step {step}", period, allowed, place)

    def waiting(self, what: str, period: int) -> AbstractContextManager[None]:
        """Context in which this rank waits until others have ended the same period."""
        return self._watchdog.doing(what, period, self._deadlines.allowed_seconds())

    def collective(self, what: str, period: int) -> AbstractContextManager[None]:
        """Context of a collective action after a period, whose duration no plan predicts."""
        return self._watchdog.doing(what, period, max(_MEETING_SECONDS, self._deadlines.allowed_seconds()))

    @contextmanager
    def evaluation(self, num_prompts: int) -> Iterator[None]:
        """Context in which deadlines are longer by the ratio of `num_prompts` to the batch size."""
        self._deadline_factor = max(1.0, num_prompts / self._batch_size)
        yield
        self._deadline_factor = self._default_factor

    def record_period(self, seconds: float) -> None:
        """Record how long a period took."""
        self._deadlines.record_period(seconds)

    def close(self) -> None:
        """Stop watching."""
        self._watchdog.close()


def _wave_ranks(plan: Plan) -> set[int]:
    """Return the ranks that generate or score waves."""
    return {
        rank for stage in plan.graph.stages if processes_all_samples(stage) for rank in plan.pool_of(stage.name).ranks
    }
