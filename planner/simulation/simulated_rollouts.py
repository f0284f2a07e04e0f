"""Simulated generation of multi-turn rollouts: which are sampling, which wait for a tool, and which wait for a slot.

With batches in flight, a period simulates the parts of rollouts that it samples, each after a prompt that contains the
turns before. The call at the end of a part is taken to be answered before the next period begins.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from meshwright.cost_models.period_ends import last_turn
from meshwright.planner.plan.plan import Plan
from meshwright.planner.simulation.simulated_flight import RoundTimes
from meshwright.planner.simulation.simulated_generation import Generated, Lengths, staleness_of_period
from meshwright.profiles.packing import replica_rows, rows_per_prompt
from meshwright.profiles.schedule import WhileWaiting
from meshwright.profiles.stages import GENERATE
from meshwright.profiles.workload import Workload


class SampledRollout(NamedTuple):
    """One sampled rollout: prompt tokens, sampled tokens of each turn, and tool tokens and seconds between turns."""

    prompt: int
    sampled_tokens: tuple[int, ...]
    tool_tokens: tuple[int, ...]
    tool_seconds: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens after the prompt."""
        return sum(self.sampled_tokens) + sum(self.tool_tokens)

    def part(self, first: int, end: int) -> SampledRollout | None:
        """Return the turns from index `first` to index `end` - 1 as a rollout whose prompt contains what precedes them;
        None if it has none of them."""
        end = min(end, len(self.sampled_tokens))
        if first >= end:
            return None
        return SampledRollout(
            self.prompt + sum(self.sampled_tokens[:first]) + sum(self.tool_tokens[:first]),
            self.sampled_tokens[first:end],
            self.tool_tokens[first : end - 1],
            self.tool_seconds[first : end - 1],
        )


def sample_rollouts(workload: Workload, prompts: Lengths, rng: np.random.Generator) -> tuple[SampledRollout, ...]:
    """Return a random rollout for each prompt; it ends with the turn in which it reaches the length limit."""
    turns = workload.turns
    assert turns is not None
    distributions = turns.number.resolve(), workload.response.resolve(), turns.result.resolve()
    number, turn_tokens, result_tokens = ((np.array(one.tokens), np.array(one.probabilities)) for one in distributions)
    latencies = turns.latency_seconds.resolve()
    rollouts = []
    for prompt in prompts.tolist():
        count = int(rng.choice(number[0], p=number[1]))
        sampled = rng.choice(turn_tokens[0], count, p=turn_tokens[1]).tolist()
        tool_tokens = rng.choice(result_tokens[0], count - 1, p=result_tokens[1]).tolist()
        waits = rng.choice(latencies.seconds, count - 1, p=latencies.probabilities).tolist()
        rollouts.append(
            _truncate(SampledRollout(prompt, tuple(sampled), tuple(tool_tokens), tuple(waits)), turns.max_tokens)
        )
    return tuple(rollouts)


def _truncate(rollout: SampledRollout, max_tokens: int) -> SampledRollout:
    sampled: list[int] = []
    remaining = max_tokens
    for number, (tokens, tool_tokens) in enumerate(zip(rollout.sampled_tokens, (*rollout.tool_tokens, 0), strict=True)):
        sampled.append(min(tokens, remaining))
        remaining -= sampled[-1] + tool_tokens
        if remaining < 1:
            return rollout._replace(
                sampled_tokens=tuple(sampled),
                tool_tokens=rollout.tool_tokens[:number],
                tool_seconds=rollout.tool_seconds[:number],
            )
    return rollout


class RolloutGeneration:
    """Generation of multi-turn rollouts."""

    def __init__(
        self, plan: Plan, rollouts_of_step: Callable[[int], Sequence[SampledRollout]], times: RoundTimes, level: float
    ) -> None:
        """`level` multiplies all seconds: it is the plan's cost of the generation over that of the cost model."""
        self._plan, self._times, self._level = plan, times, level
        self._num_batches = plan.placement(GENERATE).schedule.batches_in_flight
        self._rollouts = lru_cache(maxsize=self._num_batches + 1)(rollouts_of_step)

    def of_step(self, step: int) -> Generated:
        rollouts, placement = self._rollouts(step), self._plan.placement(GENERATE)
        workload, layout, schedule = self._plan.facts.workload, placement.layout, placement.schedule
        same_prompt = rows_per_prompt(workload.batch_size, workload.group_size, layout.dp)
        results = []
        for replica in range(layout.dp):
            rows = replica_rows(workload.batch_size, workload.group_size, replica, layout.dp)
            one = _Replica(self._times, schedule.generation_slots, layout.pp, schedule.while_waiting)
            results.append(one.simulate(*self._parts_of_period(step, rows), same_prompt))
        return Generated(
            prompts=np.array([one.prompt for one in rollouts]),
            responses=np.array([one.num_tokens for one in rollouts]),
            sampled=np.array([sum(one.sampled_tokens) for one in rollouts]),
            seconds=tuple(self._level * seconds for seconds, _ in results),
            live=tuple(live for _, live in results),
            held=(),
            tokens_by_staleness=self._tokens_by_staleness(step),
        )

    def _parts_of_period(self, step: int, rows: Sequence[int]) -> tuple[list[SampledRollout], list[SampledRollout]]:
        """Return the parts of rollouts that continue in the period that delivers `step`, oldest first, and those of
        rollouts that start in it."""
        continued, started = list[SampledRollout](), list[SampledRollout]()
        for later in range(self._num_batches):
            of_batch = self._rollouts(step + later)
            first, end = self._turns_in_period(step, later)
            parts = (of_batch[row].part(first, end) for row in rows)
            (continued if first else started).extend(part for part in parts if part)
        return continued, started

    def _turns_in_period(self, step: int, later: int) -> tuple[int, int]:
        """Return the index of the first turn, and the end, that the period of `step` samples of the batch `later` steps
        after it. The first period starts with all batches in flight."""
        turns = self._plan.facts.workload.turns
        assert turns is not None
        most, num_batches = turns.number.max, self._num_batches
        starts = step == 0 or later == num_batches - 1
        return (0 if starts else last_turn(most, num_batches, later + 1)), last_turn(most, num_batches, later)

    def _tokens_by_staleness(self, step: int) -> Mapping[int, int]:
        tokens: Counter[int] = Counter()
        for later in range(min(step + 1, self._num_batches)):
            first, end = self._turns_in_period(step - later, later)
            count = sum(sum(one.sampled_tokens[first:end]) for one in self._rollouts(step))
            if count:
                tokens[staleness_of_period(self._plan, step, step - later)] += count
        return dict(sorted(tokens.items()))


@dataclass(slots=True, kw_only=True, eq=False)
class _Rollout:
    """A rollout in one of its turns: the tokens left to sample in the turn, and the context tokens before them."""

    row: int
    sampled: SampledRollout
    turn: int = 0
    tokens_left: int = 0
    context: int = 0

    def begin_turn(self) -> None:
        self.tokens_left = self.sampled.sampled_tokens[self.turn]


class _Replica:
    """The state of one replica: live rollouts, rollouts that wait with or without a slot, and the time."""

    def __init__(self, times: RoundTimes, num_slots: int, num_stages: int, while_waiting: WhileWaiting) -> None:
        self._times, self._num_slots, self._num_stages = times, num_slots, num_stages
        self._num_groups = min(num_stages, num_slots)
        self._keeps_slot = while_waiting is WhileWaiting.KEEP
        self._now, self._num_rounds, self._row_rounds = 0.0, 0, 0
        self._live: list[_Rollout] = []
        self._waiting: list[tuple[float, int, _Rollout]] = []
        """Rollouts that wait for a tool: a heap by the time of its result."""
        self._paused: list[tuple[int, _Rollout]] = []
        """Rollouts that wait for a slot: a heap by row."""

    def simulate(
        self, continued: Sequence[SampledRollout], started: Sequence[SampledRollout], rows_per_prompt: int
    ) -> tuple[float, float]:
        """Return the seconds until all rollouts have ended, and the mean number of sequences that sample in a round.

        Rollouts that are `continued` from an earlier period get slots first, and each is prefilled; of
        `rows_per_prompt` that are `started` with one prompt the first is prefilled for all.
        """
        rollouts = [
            _Rollout(row=row, sampled=one, context=one.prompt) for row, one in enumerate((*continued, *started))
        ]
        queue, num_continued = deque(rollouts), len(continued)
        while queue or self._live or self._waiting or self._paused:
            prefills = self._receive_tool_results()
            while len(self._live) + self._num_held < self._num_slots and (self._paused or queue):
                is_paused = bool(self._paused)
                rollout = heapq.heappop(self._paused)[1] if is_paused else queue.popleft()
                rollout.begin_turn()
                self._live.append(rollout)
                index = rollout.row - num_continued  # among the rollouts that start; below 0 for the others
                if is_paused or index < 0 or index % rows_per_prompt == 0:
                    prefills.append(rollout.context)
            self._prefill(prefills)
            if self._live:
                self._decode()
            elif self._waiting:
                self._now = max(self._now, self._waiting[0][0])
        return self._now, self._row_rounds / max(self._num_rounds, 1)

    @property
    def _num_held(self) -> int:
        """Slots held by rollouts that wait for a tool."""
        return len(self._waiting) if self._keeps_slot else 0

    @property
    def _mean_context(self) -> float:
        """The mean number of tokens of the live rollouts before their current turns."""
        return sum(rollout.context for rollout in self._live) / len(self._live)

    def _receive_tool_results(self) -> list[int]:
        """Process tool results that have arrived; return the tokens to prefill of each rollout that kept its slot."""
        to_prefill = []
        while self._waiting and self._waiting[0][0] <= self._now:
            _, row, rollout = heapq.heappop(self._waiting)
            tool_tokens = rollout.sampled.tool_tokens[rollout.turn]
            rollout.turn, rollout.context = rollout.turn + 1, rollout.context + tool_tokens
            if self._keeps_slot:
                rollout.begin_turn()
                self._live.append(rollout)
                to_prefill.append(tool_tokens + 1)  # with the last sampled token, which is not cached
            else:
                heapq.heappush(self._paused, (row, rollout))
        return to_prefill

    def _prefill(self, prefills: Sequence[int]) -> None:
        """Prefill rows of these lengths: the first ones fill the pipeline; later ones delay only one slot group.

        Every round counts as one that decodes, because `_decode` counts the first token of a turn too.
        """
        if not prefills:
            return
        is_first = not self._num_rounds
        rows = np.array([float(len(prefills) if is_first else len(prefills) * self._num_groups)])
        tokens, context = np.array([[sum(prefills) / len(prefills)], [self._mean_context]])
        seconds = float(self._times.refill(rows, tokens, np.array([True]), context).sum())
        self._now += seconds if is_first else seconds / self._num_stages

    def _decode(self) -> None:
        """Decode until a turn ends or a tool result arrives, whichever is first."""
        rounds = min(rollout.tokens_left for rollout in self._live)
        context = self._mean_context + rounds / 2
        seconds = float(self._times.round_(np.array([float(len(self._live))]), np.array([context])).sum())
        if self._waiting:
            until = self._waiting[0][0] - self._now
            rounds = min(rounds, max(1, -int(-until // seconds)))
        self._now += rounds * seconds
        self._num_rounds += rounds
        self._row_rounds += rounds * len(self._live)
        still_live = []
        for rollout in self._live:
            rollout.tokens_left, rollout.context = rollout.tokens_left - rounds, rollout.context + rounds
            if rollout.tokens_left:
                still_live.append(rollout)
            elif rollout.turn < len(rollout.sampled.tool_tokens):
                heapq.heappush(
                    self._waiting, (self._now + rollout.sampled.tool_seconds[rollout.turn], rollout.row, rollout)
                )
        self._live = still_live
