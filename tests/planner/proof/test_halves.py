"""The bounds of many halves in arrays are those of each half by itself."""

from __future__ import annotations

import math
import random
from itertools import permutations

import numpy as np
import pytest

from meshwright.planner.proof.cases import Case, _Orders
from meshwright.planner.proof.checker import split
from meshwright.planner.proof.document import Overlap, Split
from meshwright.planner.proof.halves import Halves
from meshwright.planner.proof.space import AMOUNTS
from meshwright.profiles.algorithms import PPO_GRAPH
from tests.planner.jobs import RandomModel, small_facts
from tests.planner.proof.test_cases import space_of
from tests.seeds import seeds


def splits_of(case: Case, draw: random.Random, number: int) -> list[Split | Overlap]:
    """Some splits of a case both of whose halves have choices."""
    splits: list[Split | Overlap] = []
    while len(splits) < number:
        if draw.random() < 0.3:
            splits.append(Overlap(overlap=tuple(draw.sample(PPO_GRAPH.names, 2))))
            continue
        stage, amount = draw.choice(PPO_GRAPH.names), draw.choice(AMOUNTS)
        row = case.space.choices[stage].amounts[AMOUNTS.index(amount), case.remaining[stage].indices]
        bound = float(draw.choice(row.tolist()))
        if bound < row.max():
            splits.append(Split(stage=stage, amount=amount, upper_bound=bound))
    return splits


@seeds(3, all=12)
@pytest.mark.parametrize("memory", [2.0**26, 2.0**28])
def test_halves_in_arrays_have_the_bounds_of_single_cases(seed: int, memory: float) -> None:
    facts, draw = small_facts(ranks_per_node=2).model_copy(update={"staleness": 2}), random.Random(seed)
    device = facts.cluster.parts[0].device.model_copy(update={"memory_bytes": 2**30})
    facts = facts.model_copy(update={"cluster": facts.cluster.model_copy(update={"device": device})})
    case = Case.whole(space_of(facts, RandomModel(seed, memory_scale=memory), seed % 3))
    for _ in range(5):
        splits = splits_of(case, draw, 12)
        halves = [half for one in splits for half in split(case, one)]
        singly = [half.least_seconds_by_work() for half in halves]
        np.testing.assert_allclose(Halves(case, splits).least_seconds_by_work(), singly, rtol=1e-12)
        fitting = [half for half, seconds in zip(halves, singly, strict=True) if seconds < math.inf]
        if not fitting:
            break
        case = draw.choice(fitting)


@seeds(2, all=8)
def test_the_order_of_starts_finds_the_best_of_all_orders(seed: int) -> None:
    """Every order of the stages that respects their inputs, each stage as early as possible."""
    facts = small_facts(ranks_per_node=2).model_copy(update={"staleness": 2})
    case, draw = Case.whole(space_of(facts, RandomModel(seed, memory_scale=1.0), seed % 3)), random.Random(seed)
    for _ in range(3):
        case = draw.choice([half for one in splits_of(case, draw, 4) for half in split(case, one)])
    orders = _Orders(case._period, 0.0, math.inf)
    ends = [end_of(orders, order) for order in permutations(range(len(PPO_GRAPH.names)))]
    assert orders.least_end() == pytest.approx(min(ends), rel=1e-12)


def test_a_schedule_is_found_by_the_order_of_its_starts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all orders 1,364 parts would be extended in this period, many to one schedule."""
    facts, extend, extended = small_facts(ranks_per_node=2).model_copy(update={"staleness": 2}), _Orders._extend, []

    def counted(orders: _Orders, last: tuple[float, int], end: float) -> None:
        extended.append(last)
        extend(orders, last, end)

    monkeypatch.setattr(_Orders, "_extend", counted)
    Case.whole(space_of(facts, RandomModel(2, memory_scale=1.0), 2)).least_seconds_by_order(0.0)
    assert 0 < len(extended) <= 500


def end_of(orders: _Orders, order: tuple[int, ...]) -> float:
    """Return the end of one order of the stages; infinite if a stage comes before one that it reads from."""
    end, placed = 0.0, set[int]()
    orders.times_of = [None] * len(order)
    for position in order:
        if not {before for before, _ in orders.period.inputs[position]} <= placed:
            end = math.inf
            break
        start = orders._start(position)
        orders.times_of[position] = start, start + orders.period.seconds[position]
        placed.add(position)
        end = max(end, start + orders.period.seconds[position])
    orders.times_of = [None] * len(order)
    return end
