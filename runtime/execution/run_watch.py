"""The watchdog of one rank of a run: what it is told of instructions and of what ranks do together between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from meshwright.cost_models.waves import sees_waves
from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.deadlines import Deadlines, waves_beyond
from meshwright.planner.program.program import Instruction
from meshwright.runtime.execution.watchdog import Watchdog
from meshwright.runtime.launch import failing

_MEETING_SECONDS = 1800.0
"""What ranks do together beside instructions is in no plan: a checkpoint takes this long only if something hangs."""


class RunWatch:
    """Collective over the world, whose ranks give the same `began`, which no other run on them has."""

    def __init__(self, plan: Plan, out: Path, began: float, *, away_seconds: float = 0.0) -> None:
        """An instruction may take `away_seconds` longer than the plan and the turns before tell."""
        self._deadlines = Deadlines(plan, away_seconds)
        self._batch_size = plan.facts.workload.batch_size
        # Ranks that see waves follow each of them by itself; the others wait until all are drawn.
        self._usual = 1.0 if dist.get_rank() in _seeing_waves(plan) else waves_beyond(plan)
        self._more = self._usual
        store = PrefixStore(f"watch/{began}", _get_default_store())
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self._watchdog = Watchdog(store, out, rank=rank, num_ranks=num_ranks, end=failing.end)

    def instruction(self, instruction: Instruction, place: int, turn: int, step: int) -> AbstractContextManager[None]:
        """Within it the instruction of a turn is done that has this place among all."""
        allowed = self._more * self._deadlines.allowed_seconds()
        return self._watchdog.doing(f"{instruction.name} of step {step}", turn, allowed, place)

    def waiting(self, what: str, turn: int) -> AbstractContextManager[None]:
        """Within it this rank waits behind a turn until others have ended it too."""
        return self._watchdog.doing(what, turn, self._deadlines.allowed_seconds())

    def meeting(self, what: str, turn: int) -> AbstractContextManager[None]:
        """Within it all ranks do something together behind a turn that takes as long as it takes."""
        return self._watchdog.doing(what, turn, max(_MEETING_SECONDS, self._deadlines.allowed_seconds()))

    @contextmanager
    def evaluation(self, num_prompts: int) -> Iterator[None]:
        """Within it instructions may take longer, by as many more prompts as there are than in a batch."""
        self._more = max(1.0, num_prompts / self._batch_size)
        yield
        self._more = self._usual

    def met(self, seconds: float) -> None:
        """A turn took this long."""
        self._deadlines.met(seconds)

    def close(self) -> None:
        """Nothing is watched any more."""
        self._watchdog.close()


def _seeing_waves(plan: Plan) -> set[int]:
    """The ranks that draw or score what dynamic sampling chooses from."""
    return {rank for stage in plan.graph.stages if sees_waves(stage) for rank in plan.pool_of(stage.name).ranks}
