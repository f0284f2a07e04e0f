"""Where equal numbers of layers do not come out even, the costliest pipeline stage is as cheap as any split has it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest

from meshwright.profiles.layout import split_layers_by_cost
from tests.seeds import seeds


def costs_of(counts: Sequence[int], layer_costs: Sequence[int], head_cost: int) -> list[int]:
    """Of each stage, with the head behind the last layer."""
    costs = [*layer_costs[:-1], layer_costs[-1] + head_cost]
    return [sum(costs.pop(0) for _ in range(count)) for count in counts]


def every_split(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(end - start for start, end in pairwise((0, *cuts, num_layers)))


@seeds(12, all=300)
def test_no_split_has_a_cheaper_costliest_stage(seed: int) -> None:
    """Of models whose first layers cost otherwise than the rest, with heads from none to more than all layers."""
    draw = random.Random(seed)
    num_layers = draw.randint(2, 9)
    num_stages, num_first = draw.randint(2, num_layers), draw.randint(0, num_layers)
    first, then = draw.randint(1, 9), draw.randint(1, 9)
    layer_costs = (first,) * num_first + (then,) * (num_layers - num_first)
    head_cost = draw.randint(0, 3 * then)
    counts = split_layers_by_cost(layer_costs, head_cost, num_stages)
    assert len(counts) == num_stages
    assert sum(counts) == num_layers
    assert min(counts) >= 1
    least = min(max(costs_of(other, layer_costs, head_cost)) for other in every_split(num_layers, num_stages))
    assert max(costs_of(counts, layer_costs, head_cost)) == least


@pytest.mark.parametrize(
    ("num_layers", "head_cost", "counts"),
    [
        (61, 158, (3, *(4,) * 14, 2)),  # DeepSeek-V3: a head of 1.6 layers
        (25, 65, (4, 3, 3, 3, 3, 3, 3, 3)),
        (32, 65, (3, 6, 6, 6, 6, 5)),
        (24, 913, (5, 6, 6, 6, 1)),  # Qwen2.5-0.5B: a head of nine layers
        (5, 30, (3, 2)),
    ],
)
def test_the_stages_between_hold_as_many_layers_as_each_other_where_they_can(
    num_layers: int, head_cost: int, counts: tuple[int, ...]
) -> None:
    assert split_layers_by_cost((100,) * num_layers, head_cost, len(counts)) == counts


def test_where_they_cannot_the_later_stages_hold_more() -> None:
    """Two layers a stage at most leave some with one, and these have most micro-batches in flight."""
    assert split_layers_by_cost((100,) * 7, 30, 5) == (1, 1, 2, 2, 1)
    assert split_layers_by_cost((100,) * 24, 65, 16) == (*(1,) * 7, *(2,) * 8, 1)
