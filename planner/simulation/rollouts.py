"""Rollouts of several turns in simulated time: which draw, which wait for their tool, and which wait for a slot."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshwright.planner.plan.plan import Plan
from meshwright.planner.simulation.generated import Generated, Lengths, staleness_of_turn
from meshwright.planner.simulation.round_times import RoundTimes
from meshwright.profiles.packing import rows_per_prompt, share_in_order
from meshwright.profiles.schedule import WhileWaiting
from meshwright.profiles.stages import GENERATE
from meshwright.profiles.workload import Workload


class DrawnTurns(NamedTuple):
    """One rollout: tokens of its prompt, those that each turn draws, and the answers between the turns with the seconds
    until they are there."""

    prompt: int
    drawn: tuple[int, ...]
    told: tuple[int, ...]
    waits: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        """Behind the prompt."""
        return sum(self.drawn) + sum(self.told)


def draw_turns(workload: Workload, prompts: Lengths, draw: np.random.Generator) -> tuple[DrawnTurns, ...]:
    """A rollout behind each prompt. One that would have more tokens than a rollout may ends with the turn in which it
    reaches them."""
    turns = workload.turns
    assert turns is not None
    kinds = turns.number.resolve(), workload.response.resolve(), turns.result.resolve()
    number, each, result = ((np.array(one.tokens), np.array(one.probabilities)) for one in kinds)
    latencies = turns.latency_seconds.resolve()
    found = []
    for prompt in prompts.tolist():
        count = int(draw.choice(number[0], p=number[1]))
        drawn = draw.choice(each[0], count, p=each[1]).tolist()
        told = draw.choice(result[0], count - 1, p=result[1]).tolist()
        waits = draw.choice(latencies.seconds, count - 1, p=latencies.probabilities).tolist()
        found.append(_cut(DrawnTurns(prompt, tuple(drawn), tuple(told), tuple(waits)), turns.max_tokens))
    return tuple(found)


def _cut(rollout: DrawnTurns, most: int) -> DrawnTurns:
    drawn: list[int] = []
    left = most
    for number, (tokens, answer) in enumerate(zip(rollout.drawn, (*rollout.told, 0), strict=True)):
        drawn.append(min(tokens, left))
        left -= drawn[-1] + answer
        if left < 1:
            return rollout._replace(drawn=tuple(drawn), told=rollout.told[:number], waits=rollout.waits[:number])
    return rollout


class RollingOut:
    """Each step's rollouts begin and end in its own turn."""

    def __init__(
        self, plan: Plan, turns_of_step: Callable[[int], Sequence[DrawnTurns]], times: RoundTimes, level: float
    ) -> None:
        self._plan, self._turns, self._times, self._level = plan, turns_of_step, times, level

    def of_step(self, step: int) -> Generated:
        rollouts, placement = self._turns(step), self._plan.placement(GENERATE)
        workload, layout, schedule = self._plan.facts.workload, placement.layout, placement.schedule
        alike = rows_per_prompt(workload.batch_size, workload.group_size, layout.dp)
        played = []
        for replica in range(layout.dp):
            rows = share_in_order(workload.batch_size, workload.group_size, replica, layout.dp)
            one = _Replica(self._times, schedule.generation_slots, layout.pp, schedule.while_waiting)
            played.append(one.play([rollouts[row] for row in rows], alike))
        num_drawn = sum(sum(one.drawn) for one in rollouts)
        return Generated(
            prompts=np.array([one.prompt for one in rollouts]),
            responses=np.array([one.num_tokens for one in rollouts]),
            seconds=tuple(self._level * seconds for seconds, _ in played),
            live=tuple(live for _, live in played),
            held=(),
            tokens_by_staleness={staleness_of_turn(self._plan, step, step): num_drawn},
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _UnderWay:
    """A rollout in one of its turns, with the tokens that are left to draw of it and those that stand before them."""

    row: int
    rollout: DrawnTurns
    turn: int = 0
    left: int = 0
    before: int = 0

    def begin_turn(self) -> None:
        self.left = self.rollout.drawn[self.turn]


class _Replica:
    """One replica: what is live, what waits in its slot or without one, and the time."""

    def __init__(self, times: RoundTimes, num_slots: int, num_stages: int, while_waiting: WhileWaiting) -> None:
        self._times, self._num_slots, self._num_stages = times, num_slots, num_stages
        self._num_groups = min(num_stages, num_slots)
        self._keeps = while_waiting is WhileWaiting.KEEP
        self._now, self._num_rounds, self._row_rounds = 0.0, 0, 0
        self._live: list[_UnderWay] = []
        self._waiting: list[tuple[float, int, _UnderWay]] = []
        """By when their tool answers: a heap."""
        self._paused: list[tuple[int, _UnderWay]] = []
        """Without a slot, by their rows: a heap."""

    def play(self, rollouts: Sequence[DrawnTurns], rows_per_prompt: int) -> tuple[float, float]:
        """Seconds until all have ended, and the sequences that drew in a round on average."""
        queue = deque(_UnderWay(row=row, rollout=one, before=one.prompt) for row, one in enumerate(rollouts))
        while queue or self._live or self._waiting or self._paused:
            fed = self._answered()
            while len(self._live) + self._num_held < self._num_slots and (self._paused or queue):
                is_paused = bool(self._paused)
                one = heapq.heappop(self._paused)[1] if is_paused else queue.popleft()
                one.begin_turn()
                self._live.append(one)
                if is_paused or one.row % rows_per_prompt == 0:
                    fed.append(one.before)
            self._prefill(fed)
            if self._live:
                self._draw()
            elif self._waiting:
                self._now = max(self._now, self._waiting[0][0])
        return self._now, self._row_rounds / max(self._num_rounds, 1)

    @property
    def _num_held(self) -> int:
        """Slots of sequences that wait."""
        return len(self._waiting) if self._keeps else 0

    def _answered(self) -> list[int]:
        """What tools have answered by now: tokens that go through the model, of each that goes on in its slot."""
        fed = []
        while self._waiting and self._waiting[0][0] <= self._now:
            _, row, one = heapq.heappop(self._waiting)
            told = one.rollout.told[one.turn]
            one.turn, one.before = one.turn + 1, one.before + told
            if self._keeps:
                one.begin_turn()
                self._live.append(one)
                fed.append(told + 1)
            else:
                heapq.heappush(self._paused, (row, one))
        return fed

    def _prefill(self, fed: Sequence[int]) -> None:
        """Prompts that come first fill the pipeline; what comes later is in the way of one group."""
        if not fed:
            return
        is_first = not self._num_rounds
        rows = np.array([float(len(fed) if is_first else len(fed) * self._num_groups)])
        seconds = float(self._times.prefill(rows, np.array([sum(fed) / len(fed)])).sum())
        self._now += seconds if is_first else seconds / self._num_stages

    def _draw(self) -> None:
        """Rounds until a turn ends or a tool answers, whichever is first."""
        rounds = min(one.left for one in self._live)
        context = sum(one.before for one in self._live) / len(self._live) + rounds / 2
        seconds = float(self._times.round_(np.array([float(len(self._live))]), np.array([context])).sum())
        if self._waiting:
            until = self._waiting[0][0] - self._now
            rounds = min(rounds, max(1, -int(-until // seconds)))
        self._now += rounds * seconds
        self._num_rounds += rounds
        self._row_rounds += rounds * len(self._live)
        going_on = []
        for one in self._live:
            one.left, one.before = one.left - rounds, one.before + rounds
            if one.left:
                going_on.append(one)
            elif one.turn < len(one.rollout.told):
                heapq.heappush(self._waiting, (self._now + one.rollout.waits[one.turn], one.row, one))
        self._live = going_on
