"""A replica's sequences from turn to turn, without their tokens: when each is admitted, ends and is delivered.

The rules are `flight`'s and so the runtime's. Passes in which nothing begins or ends are taken together.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.program.instruction_durations import HeldBlocks
from meshwright.planner.simulation.cache_use import held_blocks, use_of
from meshwright.planner.simulation.flight import Delivery, Flight
from meshwright.planner.simulation.round_times import RoundTimes
from meshwright.planner.simulation.slot_groups import SlotGroup

_MOST_PASSES = 256
"""Passes are costed together at their middle, so many at most."""


@dataclass(slots=True, kw_only=True, eq=False)
class Drawn:
    """One prompt and its response: their tokens, and what has come of it. `step` is that of its prompt batch.

    What is not `is_prefilled` gets a copy of the keys and values of another one of its prompt.
    """

    step: int
    row: int
    prompt_tokens: int
    response_tokens: int
    is_prefilled: bool = True
    first_turn: int = -1
    first_pass: int = 0
    drawn: list[int] = field(default_factory=list)
    """Tokens that were there at the end of each turn since the first."""

    @property
    def last_pass(self) -> int:
        """The pass of its group that draws its last token."""
        return self.first_pass + self.response_tokens - 1

    def tokens_by_turn(self) -> dict[int, int]:
        """How many tokens each turn drew, of a response that has ended."""
        totals = [0, *self.drawn, self.response_tokens]
        parts = {self.first_turn + i: after - before for i, (before, after) in enumerate(pairwise(totals))}
        return {turn: tokens for turn, tokens in parts.items() if tokens}


class SimulatedGroup(SlotGroup[Drawn]):
    """A group that knows in which of its passes the next sequence ends."""

    def __init__(self, first_slot: int, num_slots: int) -> None:
        super().__init__(first_slot, num_slots)
        self.num_passes = 0
        self._has_drawn = False
        self._next_end, self._before = 0, 0

    @property
    def num_passes_left(self) -> int:
        """Passes until the next sequence ends."""
        return self._next_end - self.num_passes

    @property
    def cached(self) -> int:
        """Tokens of the live sequences in the cache, in the next pass."""
        return self._before + len(self.live) * self.num_passes

    def learn(self) -> list[Drawn]:
        """Takes out the sequences that ended in the last pass, in the order of the live ones."""
        if not self._has_drawn:
            return []
        self._has_drawn = False
        if self.num_passes < self._next_end:
            return []
        has_ended = [one.last_pass == self.num_passes for one in self.live]
        ended = [one for one, is_over in zip(self.live, has_ended, strict=True) if is_over]
        self._keep(not is_over for is_over in has_ended)
        self._look_ahead()
        return ended

    def _look_ahead(self) -> None:
        if self.live:
            self._next_end = min(one.last_pass for one in self.live)
            self._before = sum(one.prompt_tokens - one.first_pass for one in self.live)

    def advance(self, waiting: deque[Drawn], turn: int) -> list[Drawn]:
        """One pass: a token for each live sequence, and the first one for what is admitted into the free slots."""
        admitted = self._next(waiting)
        self.live += admitted
        self.skip(1)
        for one in admitted:
            one.first_turn, one.first_pass = turn, self.num_passes
        if admitted:
            self._look_ahead()
        return admitted

    def skip(self, num_passes: int) -> None:
        """Passes in which nothing begins."""
        if self.live and num_passes:
            self.num_passes += num_passes
            self._has_drawn = True


_Flight: TypeAlias = Flight[Drawn, SimulatedGroup, Drawn]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a turn delivered, in order of step and row; how long it took; the sequences in flight on average over its
    rounds, and the blocks of cache that they held."""

    delivered: tuple[Drawn, ...]
    seconds: float
    live: float
    held: HeldBlocks


class SimulatedFlight:
    """The sequences of one replica that have been admitted and not delivered, in simulated time."""

    def __init__(self, num_slots: int, num_stages: int, times: RoundTimes, *, same_prompt: int = 1) -> None:
        """`same_prompt` rows that stand one behind the other have one prompt."""
        self._flight: _Flight = Flight(SimulatedGroup.cut(num_slots, num_stages))
        self._num_stages, self._times, self._same_prompt = num_stages, times, same_prompt

    @property
    def num_rounds(self) -> int:
        """Of the last turn."""
        return self._flight.num_rounds

    def play(self, admitted: Collection[Drawn], delivery: Delivery, least_rounds: int = 0) -> Turn:
        """The next turn, as `Flight.play` has it."""
        work = _Work(self._flight, self._num_stages)
        delivered = self._flight.play(
            admitted,
            delivery,
            learn=SimulatedGroup.learn,
            advance=work.advance,
            skip=work.skip,
            least_rounds=least_rounds,
        )
        work.end()
        for group in self._flight.groups:
            for one in group.live:
                one.drawn.append(group.num_passes - one.first_pass + 1)
        seconds, held = work.seconds_and_cache(self._times, self._same_prompt)
        return Turn(delivered=delivered, seconds=seconds, live=work.live, held=held)


class _Work:
    """What a turn does: rounds of so many sequences with so many cached tokens, and prompts that are prefilled."""

    def __init__(self, flight: _Flight, num_stages: int) -> None:
        self._flight, self._num_groups, self._num_stages = flight, len(flight.groups), num_stages
        self._num_advanced, self._rows, self._cached = 0, 0, 0  # of this round
        self._decodes: list[tuple[float, float, float, float]] = []  # round, rounds, rows, cached tokens
        self._first: list[Drawn] = []
        self._refills: list[tuple[float, int, float]] = []  # round, rows, mean tokens
        self._num_rounds, self._row_rounds = 0.0, 0.0
        self._seated = [(one, one.first_pass - group.num_passes - 1) for group in flight.groups for one in group.live]
        """Every sequence that is live in the turn, and the round of its first token: before 0 where it was drawn in an
        earlier turn."""

    def advance(self, group: SimulatedGroup) -> int:
        """One pass of the group, how many sequences it admitted."""
        self._num_advanced += 1
        self._rows += len(group.live)
        self._cached += group.cached if group.live else 0
        admitted = group.advance(self._flight.waiting, self._flight.turn)
        self._admit(admitted)
        if self._num_advanced == self._num_groups:
            self.end()
        return len(admitted)

    def skip(self, most: int | None) -> int:
        """All passes until a sequence ends, at most `most` where there is a number."""
        busy = [group for group in self._flight.groups if group.live]
        skipped = min(group.num_passes_left for group in busy)
        if most is not None:
            skipped = min(skipped, most)
        left, rows = skipped, sum(len(group.live) for group in busy)
        while left:
            passes = min(left, _MOST_PASSES)
            self._decode(passes, rows, sum(group.cached for group in busy) / rows + (passes - 1) / 2)
            for group in busy:
                group.skip(passes)
            left -= passes
        return skipped

    def end(self) -> None:
        """A round is over, and with it a turn that ends in its middle: it was a part of one."""
        if self._num_advanced:
            rows = self._rows * self._num_groups / self._num_advanced
            self._decode(self._num_advanced / self._num_groups, rows, self._cached / max(1, self._rows))
        self._num_advanced, self._rows, self._cached = 0, 0, 0

    def _admit(self, admitted: Sequence[Drawn]) -> None:
        """Prompts that a group prefills in one pass; those of a turn's first round fill the pipeline together."""
        self._row_rounds += len(admitted)
        self._seated += [(one, int(self._num_rounds)) for one in admitted]
        prefilled = [one for one in admitted if one.is_prefilled]
        if not self._num_rounds:
            self._first += prefilled
        elif prefilled:
            self._refills.append((self._num_rounds, len(prefilled), _mean_prompt(prefilled)))

    def _decode(self, rounds: float, rows: float, context: float) -> None:
        if rounds and rows:
            self._decodes.append((self._num_rounds, rounds, rows, context))
        self._num_rounds += rounds
        self._row_rounds += rounds * rows

    @property
    def live(self) -> float:
        return self._row_rounds / self._num_rounds if self._num_rounds else 0.0

    def seconds_and_cache(self, times: RoundTimes, same_prompt: int) -> tuple[float, HeldBlocks]:
        """Of the turn. A later prompt is in the way of one group only, so the grid is asked as if every group had as
        many."""
        total, runs = 0.0, [np.zeros((3, 0))]  # first round, rounds, seconds
        if self._decodes:
            first, rounds, rows, contexts = np.array(self._decodes).T
            decode = rounds * times.round_(rows, contexts)
            total += float(decode.sum())
            runs.append(np.array([first, np.ceil(rounds), decode]))
        if self._first:
            rows, tokens = np.array([[len(self._first)], [_mean_prompt(self._first)]])
            prefill = times.prefill(rows, tokens)
            total += float(prefill.sum())
            runs.append(np.array([[0.0], [1.0], prefill]))
        if self._refills:
            first, rows, tokens = np.array(self._refills).T
            prefill = times.prefill(rows * self._num_groups, tokens)
            total += float(prefill.sum()) / self._num_stages
            runs.append(np.array([first, np.ones(len(first)), prefill / self._num_stages]))
        return total, self._held(np.concatenate(runs, axis=1), same_prompt)

    def _held(self, runs: NDArray[np.float64], same_prompt: int) -> HeldBlocks:
        if not self._seated:
            return HeldBlocks(0.0, 0)
        prompts, starts, responses = np.array(
            [(one.prompt_tokens, start, one.response_tokens) for one, start in self._seated]
        ).T
        ends, num_rounds = starts + responses, max(1, math.ceil(self._num_rounds))
        until = self._read_until(ends, same_prompt) if same_prompt > 1 else np.zeros_like(ends)
        held = held_blocks(prompts, starts, ends, until, num_rounds)
        first, rounds = runs[:2].astype(np.int64)
        return use_of(held, first, first + rounds, runs[2])

    def _read_until(self, ends: NDArray[np.int64], same_prompt: int) -> NDArray[np.int64]:
        """The round in which the last of those seated before ends that read the prompt: they began in the same turn."""
        found, lasts = list[int](), dict[tuple[int, int, int], int]()
        for (one, _), end in zip(self._seated, ends.tolist(), strict=True):
            prompt = one.step, one.row // same_prompt, one.first_turn
            found.append(lasts.get(prompt, 0))
            lasts[prompt] = max(found[-1], end)
        return np.array(found)


def _mean_prompt(admitted: Sequence[Drawn]) -> float:
    return statistics.fmean(one.prompt_tokens for one in admitted)
