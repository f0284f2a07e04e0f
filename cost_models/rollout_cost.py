"""Seconds of a generation whose rollouts take several turns and wait for a tool between them.

A rollout is under way for D rounds in which it draws and for W seconds in which it waits, W / tau rounds of tau seconds
each. What it takes from its first round to its last is the sum of both over its turns
(`profiles.environment.turns`), and tau follows from how many draw at a time, so that it is found by iteration: fewer
wait where rounds are longer.

Where a waiting sequence keeps its slot, slots are taken for D + W / tau rounds and list scheduling is that of
`cost_models.rounds`. Where it leaves, the rounds lie between the larger one and the sum of two: those of all that is
drawn, over the slots, and those that the longest rollout is under way (Brent, The parallel evaluation of general
arithmetic expressions, J. ACM 21(2), 1974). The root of the sum of their squares is taken, which is neither's law; with
a slot for each there is nothing to wait for but the longest. Either is stretched by how much later the slowest of the
replicas ends whose rollouts wait for slots.

Waiting is taken as spread evenly over a rollout. Of M that are under way, each draws with probability
p = D / (D + W / tau) on its own, so that in (1 - p)^M of the rounds nobody does: the device then waits. Workers are
taken as free whenever a tool is called.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshwright.cost_models.compute import Passes
from meshwright.cost_models.cost import Cost, Term
from meshwright.cost_models.generation_cost import Generation, work_of
from meshwright.cost_models.question import Once
from meshwright.cost_models.roofline import least_generation_seconds
from meshwright.cost_models.rounds import Rounds, RoundWindow, responses_of, rounds_of
from meshwright.cost_models.turn_cost import Overlap, Turns
from meshwright.profiles.lengths import Histogram, LengthSpec
from meshwright.profiles.schedule import WhileWaiting
from meshwright.profiles.workload import Workload

TOOLS = "waiting for tools"
"""The term of seconds in which no sequence of a replica draws."""

_MOST_ITERATIONS, _CLOSE = 16, 1e-3
"""Of the seconds of a round, and how near two of them are the same."""

_PER_OCTAVE = 16
"""Seconds of a round for which distributions are kept, in a range of twice as many: a sixteenth below are 4 %."""


class Replica(NamedTuple):
    """Of one generation: its rows, slots, pipeline stages and rows of one prompt, and who keeps what while it waits."""

    num_rows: int
    num_slots: int
    num_stages: int
    rows_per_prompt: int
    while_waiting: WhileWaiting


class _Played(NamedTuple):
    """The rounds in which some sequence draws, and those in which all wait."""

    busy: Rounds
    num_busy: float
    num_idle: float


class RolloutCosts:
    """Of one workload that has turns."""

    def __init__(self, workload: Workload) -> None:
        assert workload.turns is not None
        self._workload, self._turns = workload, workload.turns
        told = round((workload.response_lengths.mean - workload.drawn_lengths.mean) / 2)
        prompts = workload.prompt_lengths
        pairs = zip(prompts.tokens, prompts.probabilities, strict=True)
        self._prompt = LengthSpec(max=prompts.maximum + told, histogram=tuple((n + told, p) for n, p in pairs))
        """Half of what a rollout is told stands before an average token that it draws."""
        self._drawing = self._of_one_turn(workload.drawn_lengths)
        self._slowest = Turns(self._drawing)
        self._answer_tokens = workload.turns.result.resolve().mean
        self._alone: Once[tuple[int, int], Rounds] = Once()
        self._slower: Once[tuple[int, int], float] = Once()
        self._under_way: Once[int, Histogram] = Once()

    def seconds(self, generation: Generation, replica: Replica) -> Cost:
        """Of all rollouts of a replica."""
        guess, (cost, played) = 0.0, self._cost(generation, replica, math.inf)
        for _ in range(_MOST_ITERATIONS):
            seconds = cost.total / played.num_busy
            if abs(seconds - guess) <= _CLOSE * seconds:
                break
            guess = seconds
            cost, played = self._cost(generation, replica, guess)
        idle = played.num_idle * cost.total / played.num_busy
        return cost + Cost((Term(TOOLS, idle),))

    def least_seconds(self, generation: Generation, replica: Replica) -> float:
        """Seconds below which those are not, told without playing the turns: the larger of two.

        What is drawn, where a waiting sequence leaves. Of x sequences that draw on average, x / (1 - e^-x) do where one
        does at least, no more than x + 1.

        What is drawn and waited for. A rollout takes D tau + W seconds, which grow with tau: its rounds times tau are
        no fewer than at the least tau, which is that of a round with one row. The seconds of all are the rounds times
        tau, and the rounds those of the longest rollout or more and, where a waiting sequence keeps its slot, those
        that its replica's rollouts are under way over its slots.
        """
        waited = (1 - 2 * _CLOSE) * self._least_waited(generation, replica)
        if replica.while_waiting is WhileWaiting.KEEP:
            return waited
        responses = responses_of(self._drawing, replica.num_rows)
        drawn = least_generation_seconds(generation, responses, replica.num_slots, replica.num_slots + 1, 0)
        return max(waited, drawn)

    def _least_waited(self, generation: Generation, replica: Replica) -> float:
        """Seconds of the rounds at a tau that none is below."""
        one_row = least_generation_seconds(generation, np.array([2]), 1, 1, 0)
        step = math.floor(math.log2(one_row) * _PER_OCTAVE)
        seconds_of_round: float = 2.0 ** (step / _PER_OCTAVE)
        under_way = self._under_way.of(step, lambda: self._turns.rounds(self._workload.response, seconds_of_round))
        longest = under_way.expected_maximum(self._workload.batch_size)
        if replica.while_waiting is WhileWaiting.KEEP:
            taken = int(under_way.strata(replica.num_rows).sum()) - replica.num_rows
            return seconds_of_round * max(longest - 1, taken / replica.num_slots)
        alone = self._drawn_alone(replica)
        of_all = replica.num_rows * self._workload.drawn_lengths.mean / replica.num_slots
        whole = longest if replica.num_slots == replica.num_rows else math.hypot(longest, of_all)
        decoding = sum(window.rounds for window in alone.windows)
        return seconds_of_round * decoding * whole / alone.num_rounds

    def _cost(self, generation: Generation, replica: Replica, seconds_of_round: float) -> tuple[Cost, _Played]:
        """Of what is computed, where a round takes so many seconds; waiting takes none where those are infinite."""
        played = self._played(replica, seconds_of_round)
        answered = self._answered(replica, played.num_busy)
        work = work_of(played.busy, replica.num_slots, replica.num_stages, replica.rows_per_prompt, answered)
        return generation.seconds(work), played

    def _played(self, replica: Replica, seconds_of_round: float) -> _Played:
        drawn = self._workload.drawn_lengths
        takes_none = math.isinf(seconds_of_round)
        under_way = drawn if takes_none else self._turns.rounds(self._workload.response, seconds_of_round)
        share = min(1.0, drawn.mean / under_way.mean)
        if replica.while_waiting is WhileWaiting.KEEP:
            rounds = self._prompted(rounds_of(self._of_one_turn(under_way), replica.num_rows, replica.num_slots))
            longer, thinner = self._of_slowest(replica), share
        else:
            rounds = self._prompted(self._drawn_alone(replica))
            whole = under_way.expected_maximum(self._workload.batch_size)
            if replica.num_slots < replica.num_rows:
                of_all = replica.num_rows * drawn.mean / replica.num_slots
                whole = math.hypot(whole, of_all * self._of_slowest(replica))
            longer, thinner = max(1.0, whole / rounds.num_rounds), 1.0
        windows = tuple(w._replace(rounds=w.rounds * longer, live=w.live * thinner / longer) for w in rounds.windows)
        busy = tuple(_busy(window, share) for window in windows)
        num_busy = rounds.first.calls + sum(window.rounds for window in busy)
        num_idle = sum(window.rounds for window in windows) - sum(window.rounds for window in busy)
        return _Played(replace(rounds, num_rounds=num_busy, windows=busy), num_busy, num_idle)

    def _of_slowest(self, replica: Replica) -> float:
        """By how much the rounds of the slowest replica are more than those of the one with the longest rollout, where
        nobody waits for tools."""
        shape = replica.num_rows, replica.num_slots

        def slower() -> float:
            return self._slowest.rounds(*shape, Overlap()).num_rounds / self._drawn_alone(replica).num_rounds

        return self._slower.of(shape, slower)

    def _drawn_alone(self, replica: Replica) -> Rounds:
        """The rounds of the one with the longest rollout, where nobody waits for tools."""
        shape = replica.num_rows, replica.num_slots
        return self._alone.of(shape, lambda: rounds_of(self._drawing, *shape))

    def _of_one_turn(self, taken: Histogram) -> Workload:
        """A workload whose sequences take a slot for so many rounds."""
        pairs = tuple(zip(taken.tokens, taken.probabilities, strict=True))
        response = LengthSpec(max=taken.maximum, histogram=pairs)
        return Workload(batch_size=self._workload.batch_size, prompt=self._prompt, response=response)

    def _prompted(self, rounds: Rounds) -> Rounds:
        """Of one turn, with the prompts of this workload."""
        mean = self._workload.prompt_lengths.mean
        return replace(rounds, first=rounds.first._replace(tokens=mean), refills=rounds.refills._replace(tokens=mean))

    def _answered(self, replica: Replica, num_rounds: float) -> Passes:
        """Prefills behind the answers of tools. Those that come to a group in one round are prefilled together, and
        they come independently of each other: as many rounds have none as of a Poisson distribution."""
        workload, num_calls = self._workload, replica.num_rows * self._turns.mean_calls
        if not num_calls:
            return ()
        visits = num_rounds * min(replica.num_stages, replica.num_slots)
        passes = visits * -math.expm1(-num_calls / visits)
        cached = workload.prompt_lengths.mean + workload.response_lengths.half_of_one_met
        if replica.while_waiting is WhileWaiting.KEEP:
            return ((passes, num_calls / passes, self._answer_tokens + 1, cached),)
        return ((passes, num_calls / passes, cached + self._answer_tokens, 0.0),)


def _busy(window: RoundWindow, share: float) -> RoundWindow:
    """The rounds of a window in which some sequence draws, where each that is under way does by this share."""
    drawing = 1 - (1 - share) ** (window.live / share)
    return window._replace(rounds=window.rounds * drawing, live=window.live / drawing) if drawing else window
