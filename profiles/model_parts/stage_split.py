"""Layers dealt to pipeline stages by what they cost, where no rule of equal numbers comes out even.

Of all ways to cut the layers into stages that follow each other, none of them empty, the costliest stage is as cheap as
can be: an exact minimum of a maximum. The last stage has the head beside its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate


@cache
def split_by_cost(layer_costs: tuple[int, ...], head_cost: int, num_stages: int) -> tuple[int, ...]:
    """How many of the layers, whose costs are in one unit with that of the head, each of two or more stages holds.

    Among the splits whose costliest stage costs least, one is taken that keeps near to equal shares. If it can be, the
    stages between the first and the last hold as many layers as each other (Megatron-core,
    `num_layers_in_first_pipeline_stage` and `num_layers_in_last_pipeline_stage`), and what is over or missing is the
    first one's. There must be a layer for every stage.
    """
    stages = _Stages(layer_costs, head_cost)
    limit = stages.least_limit(num_stages)
    return _even_between(stages, limit, num_stages) or _balanced(stages, limit, num_stages)


class _Stages:
    """What runs of layers cost as stages, and how few of them there can be."""

    def __init__(self, layer_costs: Sequence[int], head_cost: int) -> None:
        self.num_layers = len(layer_costs)
        self._costs, self._head = layer_costs, head_cost
        self._sums = (0, *accumulate(layer_costs))

    def cost(self, first: int, end: int) -> int:
        """Of layers first, ..., end - 1, and of the head behind the last one."""
        return self._sums[end] - self._sums[first] + self._head_behind(end)

    def most(self, end: int, limit: int) -> int:
        """The most layers before `end` that one stage holds within the limit."""
        return next(count for count in range(end, -1, -1) if self.cost(end - count, end) <= limit)

    def num_needed(self, end: int, limit: int) -> int:
        """The fewest stages for the layers before `end` within a limit, filled one by one from the last. With as many
        layers or more, any larger number will do."""
        needed, room = 0, 0
        for number in range(end, 0, -1):
            cost = self._costs[number - 1] + self._head_behind(number)
            if cost > room:
                needed, room = needed + 1, limit
            room -= cost
        return needed

    def least_limit(self, num_stages: int) -> int:
        """The least that the costliest of so many stages costs."""
        low, high = max(*self._costs, self._costs[-1] + self._head), self.cost(0, self.num_layers)
        while low < high:
            middle = (low + high) // 2
            if self.num_needed(self.num_layers, middle) <= num_stages:
                high = middle
            else:
                low = middle + 1
        return low

    def _head_behind(self, end: int) -> int:
        return self._head if end == self.num_layers else 0


def _even_between(stages: _Stages, limit: int, num_stages: int) -> tuple[int, ...]:
    """With as many layers on each stage between the first and the last; empty where such stages would cost more."""
    num_layers, others = stages.num_layers, num_stages - 1
    last = min(stages.most(num_layers, limit), -(-num_layers // num_stages))
    for each in (-(-(num_layers - last) // others), (num_layers - last) // others):
        counts = (num_layers - last - each * (others - 1), *(each,) * (others - 1), last)
        ends = accumulate(counts)
        if min(counts) > 0 and all(
            stages.cost(end - count, end) <= limit for count, end in zip(counts, ends, strict=True)
        ):
            return counts
    return ()


def _balanced(stages: _Stages, limit: int, num_stages: int) -> tuple[int, ...]:
    """From the last stage to the first, each an equal share of the layers that are left: fewer where it costs more than
    the limit, more where those before it would."""
    counts: list[int] = []
    end = stages.num_layers
    for before in range(num_stages - 1, -1, -1):
        most = min(stages.most(end, limit), end - before)
        share = min(most, -(-end // (before + 1)))
        counts.append(next(n for n in range(share, most + 1) if stages.num_needed(end - n, limit) <= before))
        end -= counts[-1]
    return tuple(reversed(counts))
