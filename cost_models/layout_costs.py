"""Seconds and bytes of a stage that passes sequences through a pipeline, on one layout under any schedule.

    seconds = pipeline (micro-batches, recomputation), its bubble and messages as its chunks have them
            + updates, once for each minibatch and epoch, of a stage that trains
            + what waits in the host's memory, there and back
    tail    = pipeline (the last chunks), of a stage that reads what is being generated

Of these each is computed once for what it depends on, and a pipeline in chunks is told from the plain one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshwright.cost_models.cost import Addend
from meshwright.cost_models.memory_cost import LayoutMemory
from meshwright.cost_models.pipeline import Computed, Pipeline, interleaved
from meshwright.cost_models.question import Bytes
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Offload, Recompute, Schedule


@dataclass(frozen=True, kw_only=True)
class PipelineCosts:
    """One stage on one layout; `num_rows` are those of the fullest replica, in one update where the stage trains.

    `computed_of` is what its ranks compute, `tail_of` the part of what it reads while it is generated that remains
    after the last token, `away` the seconds of what is offloaded, and `plain` the same stage on the layout without
    chunks, if it has any.
    """

    layout: Layout
    num_rows: int
    num_updates: int
    pipeline_of: Callable[[Recompute], Pipeline]
    computed_of: Callable[[Schedule], Computed]
    tail_of: Callable[[Schedule], Computed]
    update: Callable[[], Sequence[Addend]]
    away: Callable[[Offload], Sequence[Addend]]
    memory: LayoutMemory
    plain: PipelineCosts | None = None
    _known: dict[tuple[int, int, Recompute, int], Sequence[Addend]] = field(default_factory=dict)
    _known_tails: dict[tuple[int, int], float] = field(default_factory=dict)
    _known_away: dict[Offload, Sequence[Addend]] = field(default_factory=dict)

    def addends(self, schedule: Schedule) -> list[Addend]:
        """Seconds of one step; raises BadInput for state that the stage has not, and for chunks that it cannot read."""
        found = (self.plain or self)._staying(schedule)
        if self.layout.vpp > 1:
            found = interleaved(found, self.layout, -(-self.num_rows // schedule.micro_batch_size))
        offload = schedule.offload
        if offload is Offload.NONE:
            return list(found)
        if offload not in self._known_away:
            self._known_away[offload] = self.away(offload)
        return [*found, *self._known_away[offload]]

    def seconds(self, schedule: Schedule) -> float:
        return math.fsum([amount for _, amount, _ in self.addends(schedule)])

    def tail_seconds(self, schedule: Schedule) -> float:
        """Seconds of the stage that remain after the last token was drawn (Yan et al., OPPO, arXiv:2509.25762)."""
        if not schedule.chunk_tokens:
            return self.seconds(schedule)
        key = schedule.micro_batch_size, schedule.chunk_tokens
        if key not in self._known_tails:
            last = self.pipeline_of(schedule.recompute).addends(self.tail_of(schedule))
            self._known_tails[key] = math.fsum([amount for _, amount, _ in last])
        return min(self.seconds(schedule), self._known_tails[key])

    def bytes(self, schedule: Schedule) -> Bytes:
        return self.memory.bytes(schedule)

    def _staying(self, schedule: Schedule) -> Sequence[Addend]:
        """Of a pipeline without chunks, all of whose state stays on the device."""
        key = schedule.micro_batch_size, schedule.micro_batch_tokens, schedule.recompute, schedule.chunk_tokens
        if key not in self._known:
            self._known[key] = self._make(schedule)
        return self._known[key]

    def _make(self, schedule: Schedule) -> Sequence[Addend]:
        once = self.pipeline_of(schedule.recompute).addends(self.computed_of(schedule))
        if not self.num_updates:
            return once
        return [(name, amount * self.num_updates, source) for name, amount, source in (*once, *self.update())]
