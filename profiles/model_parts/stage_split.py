"""The split of layers into pipeline stages by cost, for models that cannot be split into equal stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate


@cache
def split_layers_by_cost(layer_costs: tuple[int, ...], head_cost: int, num_stages: int) -> tuple[int, ...]:
    """Return the number of layers on each of two or more stages; `layer_costs` and `head_cost` share a unit.

    Among all splits into consecutive non-empty stages, the cost of the costliest stage is minimised exactly; the last
    stage also has the head. Of the optimal splits, one near to equal numbers of layers is taken. If possible, all
    stages between the first and the last hold equally many layers (Megatron-core, `num_layers_in_first_pipeline_stage`
    and `num_layers_in_last_pipeline_stage`), and the first takes the difference. There must be at least one layer per
    stage.
    """
    stages = _Stages(layer_costs, head_cost)
    limit = stages.least_limit(num_stages)
    return _even_between(stages, limit, num_stages) or _balanced(stages, limit, num_stages)


class _Stages:
    """Costs of consecutive layers as stages, and the fewest stages within a limit."""

    def __init__(self, layer_costs: Sequence[int], head_cost: int) -> None:
        self.num_layers = len(layer_costs)
        self._costs, self._head = layer_costs, head_cost
        self._sums = (0, *accumulate(layer_costs))

    def cost(self, first: int, end: int) -> int:
        """Cost of layers `first` to `end` - 1, including the head after the last layer."""
        return self._sums[end] - self._sums[first] + self._head_after(end)

    def max_layers(self, end: int, limit: int) -> int:
        """The maximum number of layers before `end` that one stage holds within the limit."""
        return next(count for count in range(end, -1, -1) if self.cost(end - count, end) <= limit)

    def num_needed(self, end: int, limit: int) -> int:
        """The fewest stages for the layers before `end` within a limit, filled greedily from the last.

        Any larger number of stages up to the number of layers is possible too.
        """
        needed, room = 0, 0
        for number in range(end, 0, -1):
            cost = self._costs[number - 1] + self._head_after(number)
            if cost > room:
                needed, room = needed + 1, limit
            room -= cost
        return needed

    def least_limit(self, num_stages: int) -> int:
        """The minimum over all splits into `num_stages` stages of the cost of the costliest."""
        low, high = max(*self._costs, self._costs[-1] + self._head), self.cost(0, self.num_layers)
        while low < high:
            middle = (low + high) // 2
            if self.num_needed(self.num_layers, middle) <= num_stages:
                high = middle
            else:
                low = middle + 1
        return low

    def _head_after(self, end: int) -> int:
        return self._head if end == self.num_layers else 0


def _even_between(stages: _Stages, limit: int, num_stages: int) -> tuple[int, ...]:
    """A split within the limit with equally many layers between the first and the last stage, or empty."""
    num_layers, others = stages.num_layers, num_stages - 1
    last = min(stages.max_layers(num_layers, limit), -(-num_layers // num_stages))
    for each in (-(-(num_layers - last) // others), (num_layers - last) // others):
        counts = (num_layers - last - each * (others - 1), *(each,) * (others - 1), last)
        ends = accumulate(counts)
        if min(counts) > 0 and all(
            stages.cost(end - count, end) <= limit for count, end in zip(counts, ends, strict=True)
        ):
            return counts
    return ()


def _balanced(stages: _Stages, limit: int, num_stages: int) -> tuple[int, ...]:
    """A split within the limit, built from the last stage to the first.

    Each stage takes an equal share of the remaining layers, fewer to keep the limit, more if earlier stages could not.
    """
    counts: list[int] = []
    end = stages.num_layers
    for before in range(num_stages - 1, -1, -1):
        largest = min(stages.max_layers(end, limit), end - before)
        share = min(largest, -(-end // (before + 1)))
        counts.append(next(n for n in range(share, largest + 1) if stages.num_needed(end - n, limit) <= before))
        end -= counts[-1]
    return tuple(reversed(counts))
