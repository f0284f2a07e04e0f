"""Seconds of a generation with multi-turn rollouts, which wait for a tool between their turns.

A rollout samples in D rounds and waits for its tools W seconds, which are W / tau rounds of tau seconds each. Its
rounds from first to last are the sum of both over its turns (`profiles.environment.turns`). tau depends on how many
rollouts sample at a time, so it is found by iteration: with longer rounds, fewer of them wait.

If a waiting sequence keeps its slot, a slot is taken for D + W / tau rounds, and slots are assigned by the list
scheduling of `cost_models.rounds`. If it leaves its slot, the number of rounds lies between the maximum and the sum of
two numbers: the rounds of all sampled tokens over the slots, and the rounds of the longest rollout (Brent, The parallel
evaluation of general arithmetic expressions, J. ACM 21(2), 1974). The square root of the sum of their squares is used,
which is an approximation; with a slot for each rollout it is the longest rollout alone. If rollouts wait for slots,
the rounds with kept slots, or those of all sampled tokens over the slots, are scaled by how much later the slowest
replica ends.

Waiting is assumed to be spread evenly over a rollout. Each of M rollouts in flight samples with probability
p = D / (D + W / tau), independently, so in a fraction (1 - p)^M of the rounds none does and the device idles. A worker
is assumed to be free whenever a tool is called.

With B batches in flight a period samples a part of the rollouts of each of B batches: of the j-th youngest one those
turns that `cost_models.period_ends.WholeTurns` allows. A period therefore takes as long as a generation whose rollouts
are these parts, each after a prompt that contains the turns before. The call at the end of a part is assumed to be
answered before the next period begins.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from meshwright.cost_models.compute import Passes
from meshwright.cost_models.cost import Cost, Term
from meshwright.cost_models.generation_cost import Generation, generation_work
from meshwright.cost_models.lower_bounds import RoundKindsOf, generation_lower_bound
from meshwright.cost_models.period_ends import last_turn
from meshwright.cost_models.protocol import Memo
from meshwright.cost_models.rounds import Integers, Rounds, RoundWindow, replica_responses, rounds_of_responses
from meshwright.cost_models.steady_state import Overlap, SteadyState
from meshwright.profiles.environment.turns import ToolTurns
from meshwright.profiles.lengths import Histogram, InterpolatedLengths, Lengths, LengthSpec
from meshwright.profiles.schedule import WhileWaiting
from meshwright.profiles.workload import Workload

TOOLS = "waiting for tools"
"""Name of the term for seconds in which every sequence of a replica waits for a tool."""

_MAX_ITERATIONS, _TOLERANCE = 16, 1e-3
"""Limit on the iterations for the seconds of a round, and the relative tolerance at which they stop."""

_PER_OCTAVE = 16
"""Grid points per doubling of the seconds of a round. The rounds of rollouts are computed at these points and
interpolated between them: except for rounding to whole rounds, they are linear in the inverse of these seconds."""


class Replica(NamedTuple):
    """The shape of one replica of a generation, and whether waiting rollouts keep their slots."""

    num_rows: int
    num_slots: int
    num_stages: int
    rows_per_prompt: float
    while_waiting: WhileWaiting


class _RolloutRounds(NamedTuple):
    """The rounds in which some sequence samples, and the number of those in which all wait."""

    busy: Rounds
    num_busy: float
    num_idle: float


class _Parts(NamedTuple):
    """The parts of rollouts that a period samples: their number for each rollout of a batch, and the mean tokens before
    a part that starts a rollout and before one that continues it."""

    per_rollout: float
    mean_first: float
    mean_continued: float

    @property
    def first_share(self) -> float:
        """The share of parts that start a rollout."""
        return 1 / self.per_rollout

    def num_prefilled(self, rows_per_prompt: float) -> float:
        """Return the share of parts that are prefilled, if `rows_per_prompt` rollouts that start share a prompt."""
        return self.first_share / rows_per_prompt + 1 - self.first_share

    def of(self, replica: Replica) -> Replica:
        """Return the replica with a row for each part."""
        num_rows = max(1, round(replica.num_rows * self.per_rollout))
        return replica._replace(num_rows=num_rows, num_slots=min(replica.num_slots, num_rows))


class RolloutCosts:
    """Costs of the multi-turn rollouts of one workload."""

    def __init__(self, workload: Workload, parts: _Parts | None = None) -> None:
        """If the rollouts of the workload are `parts` of longer ones, its prompts contain what precedes a part."""
        assert workload.turns is not None
        self._workload, self._turns, self._parts = workload, workload.turns, parts
        self._by_batches: Memo[int, RolloutCosts] = Memo()
        half_tool_tokens = round((workload.response_lengths.mean - workload.sampled_lengths.mean) / 2)
        prompts = workload.prompt_lengths
        self._prompts = Histogram(tuple(n + half_tool_tokens for n in prompts.tokens), prompts.probabilities)
        """The prompt lengths plus half of a rollout's tool tokens, which precede an average sampled token."""
        self._periods = SteadyState(self._single_turn_workload())
        self._result_tokens = workload.turns.result.resolve().mean
        self._isolated_rounds: Memo[tuple[int, int, float], Rounds] = Memo()
        self._slowdowns: Memo[tuple[int, int], float] = Memo()
        self._lifetimes: Memo[int, Histogram] = Memo()

    def with_batches_in_flight(self, num_batches: int) -> RolloutCosts:
        """Return the costs of a period with this number of batches in flight."""
        if num_batches == 1:
            return self
        return self._by_batches.memoize(
            num_batches, lambda: RolloutCosts(*_parts_of_rollouts(self._workload, self._turns, num_batches))
        )

    def seconds(self, generation: Generation, replica: Replica) -> Cost:
        """Return the seconds of all rollouts of a replica, or of their parts."""
        replica = self._parts.of(replica) if self._parts else replica
        guess, (cost, rounds) = 0.0, self._cost(generation, replica, math.inf)
        for _ in range(_MAX_ITERATIONS):
            seconds = cost.total / rounds.num_busy
            if abs(seconds - guess) <= _TOLERANCE * seconds:
                break
            guess = seconds
            cost, rounds = self._cost(generation, replica, guess)
        idle = rounds.num_idle * cost.total / rounds.num_busy
        return cost + Cost((Term(TOOLS, idle),))

    def lower_bound_seconds(self, generation: Generation, replica: Replica, *, kinds_of: RoundKindsOf) -> float:
        """Return a lower bound on `seconds` without simulating: the larger of two bounds.

        Sampling alone (only if a waiting sequence leaves its slot): if x sequences sample on average over all rounds,
        x / (1 - e^-x) <= x + 1 sample on average over the rounds in which at least one does.

        Sampling and waiting: a rollout takes D tau + W seconds, which grow with tau, so they are bounded by the
        smallest tau, that of a round with one row. The rounds are at least those of the longest rollout and, if a
        waiting sequence keeps its slot, those of all rollouts of the replica over its slots.
        """
        replica = self._parts.of(replica) if self._parts else replica
        with_waiting = (1 - 2 * _TOLERANCE) * self._min_waiting_seconds(generation, replica, kinds_of)
        if replica.while_waiting is WhileWaiting.KEEP:
            return with_waiting
        num_tokens = int(self._responses(self._workload.sampled_lengths, replica).sum()) - replica.num_rows
        sampling = generation_lower_bound(
            generation, num_tokens, replica.num_slots, replica.num_slots + 1, 0, kinds_of=kinds_of
        )
        return max(with_waiting, sampling)

    def _min_waiting_seconds(self, generation: Generation, replica: Replica, kinds_of: RoundKindsOf) -> float:
        """Return the seconds of sampling and waiting at the smallest possible tau."""
        one_row = generation_lower_bound(generation, 1, 1, 1, 0, kinds_of=kinds_of)
        step = math.floor(math.log2(one_row) * _PER_OCTAVE)
        seconds_of_round = _seconds_on_grid(step)
        lifetime = self._lifetime_on_grid(step)
        longest = lifetime.expected_maximum(self._workload.batch_size)
        if replica.while_waiting is WhileWaiting.KEEP:
            occupied = int(lifetime.stratified_sample(replica.num_rows).sum()) - replica.num_rows
            return seconds_of_round * max(longest - 1, occupied / replica.num_slots)
        rounds = self._rounds_without_tools(replica)
        throughput_rounds = replica.num_rows * self._workload.sampled_lengths.mean / replica.num_slots
        num_rounds = longest if replica.num_slots == replica.num_rows else math.hypot(longest, throughput_rounds)
        decoding = sum(window.rounds for window in rounds.windows)
        return seconds_of_round * decoding * num_rounds / rounds.num_rounds

    def _cost(self, generation: Generation, replica: Replica, seconds_of_round: float) -> tuple[Cost, _RolloutRounds]:
        """Return the cost of compute if a round takes `seconds_of_round`; if that is infinite, waiting is free."""
        rounds = self._rounds(replica, seconds_of_round)
        tool_prefills = self._tool_prefills(replica, rounds.num_busy)
        same_prompt = replica.rows_per_prompt
        if self._parts:
            same_prompt = 1 / self._parts.num_prefilled(same_prompt)
        work = generation_work(rounds.busy, replica.num_slots, replica.num_stages, same_prompt, tool_prefills)
        return generation.seconds(work), rounds

    def _rounds(self, replica: Replica, seconds_of_round: float) -> _RolloutRounds:
        sampled = self._workload.sampled_lengths
        lifetime = sampled if math.isinf(seconds_of_round) else self._lifetime(seconds_of_round)
        share = min(1.0, sampled.mean / lifetime.mean)
        if replica.while_waiting is WhileWaiting.KEEP:
            rounds = self._rounds_in_slots(lifetime, replica)
            stretch, live_share = self._slowdown(replica), share
        else:
            rounds = self._rounds_without_tools(replica)
            total_rounds = lifetime.expected_maximum(self._workload.batch_size)
            if replica.num_slots < replica.num_rows:
                throughput_rounds = replica.num_rows * sampled.mean / replica.num_slots
                total_rounds = math.hypot(total_rounds, throughput_rounds * self._slowdown(replica))
            stretch, live_share = max(1.0, total_rounds / rounds.num_rounds), 1.0
        windows = tuple(
            w._replace(rounds=w.rounds * stretch, live=w.live * live_share / stretch) for w in rounds.windows
        )
        busy = tuple(_busy_window(window, share) for window in windows)
        num_busy = rounds.first.calls + sum(window.rounds for window in busy)
        num_idle = sum(window.rounds for window in windows) - sum(window.rounds for window in busy)
        return _RolloutRounds(replace(rounds, num_rounds=num_busy, windows=busy), num_busy, num_idle)

    def _slowdown(self, replica: Replica) -> float:
        """Return the rounds of the slowest replica over those of the one with the longest rollout, without waits."""
        shape = replica.num_rows, replica.num_slots

        def ratio() -> float:
            return self._periods.rounds(*shape, Overlap()).num_rounds / self._rounds_without_tools(replica).num_rounds

        return self._slowdowns.memoize(shape, ratio)

    def _rounds_without_tools(self, replica: Replica) -> Rounds:
        """Return the rounds of the replica with the longest rollout, without tool waits."""
        shape = replica.num_rows, replica.num_slots, replica.rows_per_prompt
        return self._isolated_rounds.memoize(
            shape, lambda: self._rounds_in_slots(self._workload.sampled_lengths, replica)
        )

    def _rounds_in_slots(self, occupied: Lengths, replica: Replica) -> Rounds:
        """Return the rounds of a replica whose rollouts each occupy a slot for `occupied` rounds."""
        rounds = rounds_of_responses(self._responses(occupied, replica), self._prompts, replica.num_slots)
        mean = self._mean_prefill(replica)  # prompts are prefilled without tool tokens
        return replace(rounds, first=rounds.first._replace(tokens=mean), refills=rounds.refills._replace(tokens=mean))

    def _mean_prefill(self, replica: Replica) -> float:
        """Return the mean tokens of a prompt that is prefilled."""
        if not (parts := self._parts):
            return self._workload.prompt_lengths.mean
        started, continued = parts.first_share / replica.rows_per_prompt, 1 - parts.first_share
        tokens = started * parts.mean_first + continued * parts.mean_continued
        return tokens / parts.num_prefilled(replica.rows_per_prompt)

    def _responses(self, lengths: Lengths, replica: Replica) -> Integers:
        return replica_responses(lengths, self._workload.batch_size, replica.num_rows)

    def _single_turn_workload(self) -> Workload:
        """Return the single-turn workload in which all sampled tokens of a rollout are one response."""
        prompt, response = (
            LengthSpec(max=lengths.maximum, histogram=tuple(zip(lengths.tokens, lengths.probabilities, strict=True)))
            for lengths in (self._prompts, self._workload.sampled_lengths)
        )
        return Workload(batch_size=self._workload.batch_size, prompt=prompt, response=response)

    def _lifetime(self, seconds_of_round: float) -> InterpolatedLengths:
        """Return the rounds of a rollout from first to last, with those in which it waits for its tool."""
        step = math.floor(math.log2(seconds_of_round) * _PER_OCTAVE)
        shortest, longest = _seconds_on_grid(step), _seconds_on_grid(step + 1)
        share = (1 / seconds_of_round - 1 / shortest) / (1 / longest - 1 / shortest)
        return InterpolatedLengths(self._lifetime_on_grid(step), self._lifetime_on_grid(step + 1), share)

    def _lifetime_on_grid(self, step: int) -> Histogram:
        return self._lifetimes.memoize(
            step, lambda: self._turns.rounds(self._workload.response, _seconds_on_grid(step))
        )

    def _tool_prefills(self, replica: Replica, num_rounds: float) -> Passes:
        """Return the prefills after tool results.

        Results that reach a group in the same round are prefilled together. They arrive independently, so the number of
        rounds without any follows a Poisson distribution.
        """
        workload, num_calls = self._workload, replica.num_rows * self._turns.mean_calls
        if not num_calls:
            return ()
        visits = num_rounds * min(replica.num_stages, replica.num_slots)
        passes = visits * -math.expm1(-num_calls / visits)
        cached = workload.prompt_lengths.mean + workload.response_lengths.mean_tokens_in_flight
        if replica.while_waiting is WhileWaiting.KEEP:
            return ((passes, num_calls / passes, self._result_tokens + 1, cached),)
        return ((passes, num_calls / passes, cached + self._result_tokens, 0.0),)


def _parts_of_rollouts(workload: Workload, turns: ToolTurns, num_batches: int) -> tuple[Workload, _Parts]:
    """Return the workload whose rollouts are the parts that a period samples, with that number of batches in flight.

    The tokens before a part are those of a prompt and of mean turns.
    """
    number, prompts = turns.number.resolve(), workload.prompt_lengths
    mean_turn = workload.response.resolve().mean + turns.result.resolve().mean
    bounds = [0, *(last_turn(turns.number.max, num_batches, left) for left in reversed(range(num_batches)))]
    in_part, before = defaultdict[int, float](float), defaultdict[int, float](float)
    for first, last in pairwise(bounds):
        share = 0.0
        for count, probability in zip(number.tokens, number.probabilities, strict=True):
            if count > first:
                in_part[min(count, last) - first] += probability
                share += probability
        preceding = min(round(first * mean_turn), turns.max_tokens - 1)
        for tokens, probability in zip(prompts.tokens, prompts.probabilities, strict=True):
            before[tokens + preceding] += share * probability
    per_rollout = sum(in_part.values())
    mean_before = sum(tokens * share for tokens, share in before.items()) / per_rollout
    mean_continued = (per_rollout * mean_before - prompts.mean) / (per_rollout - 1) if per_rollout > 1 else 0.0
    parts = _Parts(per_rollout, prompts.mean, mean_continued)
    changes = {
        "batch_size": round(workload.batch_size * per_rollout),
        "group_size": 1,
        "num_minibatches": 1,
        "prompt": LengthSpec(max=max(before), histogram=tuple(sorted(before.items()))),
        "turns": turns.model_copy(
            update={"number": LengthSpec(max=max(in_part), histogram=tuple(sorted(in_part.items())))}
        ),
    }
    return workload.model_copy(update=changes), parts


def _seconds_on_grid(step: int) -> float:
    """Return the seconds of a round at a point of the grid."""
    seconds: float = 2.0 ** (step / _PER_OCTAVE)
    return seconds


def _busy_window(window: RoundWindow, share: float) -> RoundWindow:
    """Return the rounds of a window in which some sequence samples, if each does with probability `share`."""
    busy_share = 1 - (1 - share) ** (window.live / share)
    if not busy_share:
        return window
    return window._replace(rounds=window.rounds * busy_share, live=window.live / busy_share)
