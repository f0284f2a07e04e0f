"""Seconds of a decode round and of a prefill on a grid, for fast lookup in a simulation.

The cost model is asked about small batches of equal lengths: a batch of n rows with responses of one token is one
prefill of n rows, and two more tokens are two rounds of n live sequences. The answers include the equation of
`cost_models.generation_cost`, max(m, p) x tau(group) for a round; between the grid points they are interpolated
linearly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.cost_models.question import Call
from meshwright.planner.plan.calls import CostModelBuilder
from meshwright.planner.plan.job import Facts
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.workload import Workload

Numbers = NDArray[np.float64]

_NUM_RATIOS, _NUM_STEPS = 6, 24
"""Numbers of grid points of the lengths, geometrically and linearly spaced up to the longest sequence."""


@dataclass(frozen=True)
class Grid:
    """Seconds over rows and tokens, both ascending; linear between the points and constant beyond them."""

    rows: Numbers
    tokens: Numbers
    seconds: Numbers  # [rows, tokens]

    def __call__(self, rows: Numbers, tokens: Numbers) -> Numbers:
        row, across = _place(self.rows, rows)
        column, along = _place(self.tokens, tokens)
        low = self.seconds[row, column] * (1 - along) + self.seconds[row, column + 1] * along
        high = self.seconds[row + 1, column] * (1 - along) + self.seconds[row + 1, column + 1] * along
        interpolated: Numbers = low * (1 - across) + high * across
        return interpolated


def _place(points: Numbers, values: Numbers) -> tuple[NDArray[np.intp], Numbers]:
    """Return for each value the index of the point below it, and its relative position towards the next one."""
    below = np.minimum(np.maximum(np.searchsorted(points, values, side="right") - 1, 0), len(points) - 2)
    share = (values - points[below]) / (points[below + 1] - points[below])
    return below, np.minimum(np.maximum(share, 0.0), 1.0)  # np.clip takes several times as long for so few


@dataclass(frozen=True, kw_only=True)
class RoundTimes:
    """Seconds on one replica: `prefill` by rows and tokens on an empty pipeline, and a decode round (`round_`) of all
    groups by live sequences and cached tokens."""

    prefill: Grid
    round_: Grid


def round_times(facts: Facts, call: Call, remodel: CostModelBuilder) -> RoundTimes:
    """Return the seconds by the cost model of `facts`, on a grid of lengths and rows, up to twice the call's slots."""
    slots = call.schedule.generation_slots
    rows = sorted({*(2**k for k in range(slots.bit_length())), slots, 2 * slots})
    longest = max(2, facts.workload.max_tokens)
    points = (*np.geomspace(1, longest, _NUM_RATIOS), *np.linspace(1, longest, _NUM_STEPS))
    lengths = sorted({round(n) for n in points})
    prefills, rounds = np.empty((len(rows), len(lengths))), np.empty((len(rows), len(lengths)))
    for i, num_rows in enumerate(rows):
        grid_call = replace(call, schedule=Schedule(generation_slots=num_rows), max_deferral=0)
        for j, length in enumerate(lengths):
            first, third = (remodel(_with(facts, call, num_rows, length, n)).seconds(grid_call).total for n in (1, 3))
            prefills[i, j], rounds[i, j] = first, (third - first) / 2
    axes = np.array(rows, dtype=float), np.array(lengths, dtype=float)
    return RoundTimes(prefill=Grid(*axes, prefills), round_=Grid(*axes, rounds))


def _with(facts: Facts, call: Call, num_rows: int, prompt: int, response: int) -> Facts:
    """Return the facts with `num_rows` sequences of equal lengths on each replica."""
    workload = Workload(
        batch_size=num_rows * call.layout.dp,
        prompt=LengthSpec(max=prompt, fixed=prompt),
        response=LengthSpec(max=response, fixed=response),
    )
    return facts.model_copy(update={"workload": workload})
