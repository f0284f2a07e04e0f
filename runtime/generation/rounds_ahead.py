"""Rounds of a group in which nothing can begin and nobody ends by length, drawn one after the other.

A CPU looks at what each round drew before it draws the next. A GPU would wait for its host at every look: there
several rounds are launched, each on the tokens that the one before has drawn, and looked at together. What lies behind
the first end token among them is dropped and drawn again when its turn comes, with the same random numbers, so both
ways draw the same.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt

import numpy as np
import torch
from torch import Tensor

from meshwright.runtime.generation.passes import Passes, StepRows
from meshwright.runtime.generation.records import NO_LIMIT, Reals
from meshwright.runtime.generation.sampling import Uniforms
from meshwright.runtime.generation.seating import Seating
from meshwright.runtime.generation.slots import LiveGroup
from meshwright.runtime.generation.stopping import Stopping
from meshwright.runtime.model.cache_blocks import Numbers

Choose = Callable[[Tensor, Tensor], Tensor]
"""Tokens and log-probabilities [2, B] float64 from logits [B, V / tp] and random numbers [B]."""


class Pace:
    """How many rounds are launched between two looks.

    With an end token every n rounds, launching k at a time drops (k - 1) / 2 of them at each end and saves a look in
    all but one of k: the k that costs least grows with the root of n. The factor is that of a look which costs the host
    a tenth to a third of what a round costs the device (Qwen2.5-0.5B to Llama-3.1-8B on an H200, 2026-11-26).
    """

    _MOST = 16

    def __init__(self, *, may_end: bool) -> None:
        """Without end tokens nothing is ever dropped."""
        self._num_rounds, self._num_ends, self._may_end = 0, 0, may_end

    @property
    def rounds(self) -> int:
        if not self._may_end:
            return self._MOST
        return max(1, min(self._MOST, isqrt(self._num_rounds // (4 * (1 + self._num_ends)))))

    def note(self, num_rounds: int, *, ended: bool) -> None:
        """That an end token came behind so many rounds, or none."""
        self._num_rounds += num_rounds
        self._num_ends += ended


class RoundsAhead:
    """Of a generator whose one stage nobody else waits for."""

    def __init__(
        self, passes: Passes, seating: Seating, stopping: Stopping, uniforms: Uniforms, choose: Choose, *, looks: bool
    ) -> None:
        """`looks` at every round, as on a CPU."""
        self._passes, self._seating, self._stopping = passes, seating, stopping
        self._uniforms, self._choose, self._looks = uniforms, choose, looks
        self.pace = Pace(may_end=bool(stopping.eos_tokens))

    def draw(self, group: LiveGroup, drawn: Tensor, most: int | None, version: int) -> tuple[int, Tensor]:
        """Draws on, at most so many rounds where a number is given, until an end token has been drawn: how many rounds
        have been recorded, by policy `version`, and what is drawn behind them, [2, B], as `drawn` was before."""
        records, rows, slots = group.records, group.rows, group.first_slot + group.rows
        cached, positions = records.cached(rows) + 1, records.num_drawn[rows] + 1
        left = self._stopping.left(group) - 1, Uniforms.left(positions), NO_LIMIT if most is None else most
        if self._looks:
            count = min(*left, self._seating.left(slots, cached))
        else:
            count = self._seating.grow_ahead(slots, cached, min(*left, self.pace.rounds))
        if count <= 0:
            return 0, drawn
        numbers = self._uniforms.ahead(slots, records.draws[rows], positions, count)
        each = self._each if self._looks else self.together
        learned, drawn = each(StepRows(slots, cached, cached), drawn, numbers)
        records.add_several(rows, learned, version)
        if not self._looks:
            self._seating.give_back(slots, cached + len(learned))
        return len(learned), drawn

    def _each(self, rows: StepRows, drawn: Tensor, numbers: Tensor) -> tuple[Reals, Tensor]:
        """With a look at every round: what was drawn until an end token [rounds, 2, B], and what behind."""
        learned = list[Reals]()
        while len(learned) < len(numbers):
            tokens = drawn[0].numpy().astype(int)
            if self._stopping.is_end(tokens):
                break
            output = self._passes(StepRows(rows.slots, rows.cached + len(learned), tokens), (), ())
            assert output is not None, "a stage alone has logits"
            learned.append(drawn.numpy())
            drawn = self._choose(output, numbers[len(learned) - 1])
        return np.array(learned), drawn

    def together(self, rows: StepRows, drawn: Tensor, numbers: Tensor) -> tuple[Reals, Tensor]:
        """With one look behind the last round: what was drawn until an end token [rounds, 2, B], and what behind."""
        step, several = self._passes.successive(rows, len(numbers)), [drawn]
        for number in numbers.to(drawn.device):
            several.append(self._choose(step(several[-1][0].long()), number))
        told = torch.stack(several).cpu()
        found: Reals = told.numpy()
        ends = self._ends(found[:-1, 0].astype(int))
        self.pace.note(ends, ended=ends < len(numbers))
        return found[:ends], told[ends]

    def _ends(self, tokens: Numbers) -> int:
        """The first of the rounds [rounds, B] that has drawn an end token, or their number."""
        return next((index for index, of_round in enumerate(tokens) if self._stopping.is_end(of_round)), len(tokens))
