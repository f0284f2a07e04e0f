"""Seconds and bytes of a forward or training stage on one layout under any schedule.

    seconds = pipeline (micro-batches, recomputation), with the bubble and messages of its virtual stages
            + optimizer updates, one for each minibatch and epoch, if the stage trains
            + offload and reload
    tail    = pipeline (the last chunks), if the stage streams

Each addend is cached by what it depends on. An interleaved pipeline is derived from the plain one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshwright.cost_models.cost import Addend
from meshwright.cost_models.memory_cost import LayoutMemory
from meshwright.cost_models.pipeline import BatchCompute, Pipeline, interleaved
from meshwright.cost_models.question import Bytes
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Offload, Recompute, Schedule


@dataclass(frozen=True, kw_only=True)
class PipelineCosts:
    """Costs of one stage on one layout; `num_rows` are the rows of the fullest replica (per update if it trains).

    `computed_of` returns the compute of a schedule, `tail_of` the compute that remains after the last token if the
    stage streams, `away` the seconds of an offload. `plain` is the same stage on the layout without virtual pipeline
    stages, if the layout has them.
    """

    layout: Layout
    num_rows: int
    num_updates: int
    pipeline_of: Callable[[Recompute], Pipeline]
    compute_of: Callable[[Schedule], BatchCompute]
    tail_of: Callable[[Schedule], BatchCompute]
    update: Callable[[], Sequence[Addend]]
    offload_addends: Callable[[Offload], Sequence[Addend]]
    memory: LayoutMemory
    without_vpp: PipelineCosts | None = None
    _known: dict[tuple[int, int, Recompute, int], Sequence[Addend]] = field(default_factory=dict)
    _known_tails: dict[tuple[int, int], float] = field(default_factory=dict)
    _known_away: dict[Offload, Sequence[Addend]] = field(default_factory=dict)

    def addends(self, schedule: Schedule) -> list[Addend]:
        """Return the seconds of one step. Raises BadInput for state or chunks that the stage does not have."""
        addends = (self.without_vpp or self)._without_offload(schedule)
        if self.layout.vpp > 1:
            addends = interleaved(addends, self.layout, -(-self.num_rows // schedule.micro_batch_size))
        offload = schedule.offload
        if offload is Offload.NONE:
            return list(addends)
        if offload not in self._known_away:
            self._known_away[offload] = self.offload_addends(offload)
        return [*addends, *self._known_away[offload]]

    def seconds(self, schedule: Schedule) -> float:
        return math.fsum([amount for _, amount, _ in self.addends(schedule)])

    def tail_seconds(self, schedule: Schedule) -> float:
        """Return the seconds that remain after the last token was sampled (Yan et al., OPPO, arXiv:2509.25762)."""
        if not schedule.chunk_tokens:
            return self.seconds(schedule)
        key = schedule.micro_batch_size, schedule.chunk_tokens
        if key not in self._known_tails:
            last = self.pipeline_of(schedule.recompute).addends(self.tail_of(schedule))
            self._known_tails[key] = math.fsum([amount for _, amount, _ in last])
        return min(self.seconds(schedule), self._known_tails[key])

    def bytes(self, schedule: Schedule) -> Bytes:
        return self.memory.bytes(schedule)

    def _without_offload(self, schedule: Schedule) -> Sequence[Addend]:
        """Return the seconds of a plain pipeline without offload."""
        key = schedule.micro_batch_size, schedule.micro_batch_tokens, schedule.recompute, schedule.chunk_tokens
        if key not in self._known:
            self._known[key] = self._make(schedule)
        return self._known[key]

    def _make(self, schedule: Schedule) -> Sequence[Addend]:
        one_pass = self.pipeline_of(schedule.recompute).addends(self.compute_of(schedule))
        if not self.num_updates:
            return one_pass
        return [(name, amount * self.num_updates, source) for name, amount, source in (*one_pass, *self.update())]
