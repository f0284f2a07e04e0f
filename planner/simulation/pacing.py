"""The pacing of generation: the ramp-up of the overcommit, and the minimum number of decode rounds of a period.

A period that overcommits delivers the sequences that end first and defers the long ones. Until the number of deferred
sequences is constant, the delivered batches lack their tokens, whose mean length is biased (inspection paradox: the
probability to be in flight is proportional to length; Cox, Renewal Theory, 1962, section 5). A replica therefore
defers at most 1/`ROWS_PER_DEFERRAL` of its rows more in each step, which spreads the missing tokens over many batches
(partial rollouts have the same bias: Kimi k1.5, arXiv:2501.12599, section 2.6; APRIL, arXiv:2509.18521).

Sequences that start together end together: with a slot for every sequence in flight, one period waits for a whole
response and the next one for nothing, and stages that run concurrently wait in turn. A period therefore continues for
a minimum number of rounds while tokens are left to sample. Replicas that wait for each other continue for the planned
number of rounds; a single replica continues for a fifth more rounds than it would wait for the busiest ranks that do
not generate. There is no minimum where it would not help.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection

from meshwright.cost_models.steady_state import Overlap, SteadyState
from meshwright.planner.plan.layout_and_schedule_rules import rows_per_replica
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.stages import GENERATE

ROWS_PER_DEFERRAL = 32
"""Rows of a replica per additional deferred sequence and step.

The longest of 32 geometric lengths is four times the mean. While the overcommit grows, which takes 32 steps if it is a
whole batch, a batch therefore lacks 3 to 10 % of the sampled tokens, and nothing afterwards.
"""


def num_deferred(step: int, before: int, limit: int, num_rows: int) -> int:
    """Return the sequences that a replica has in flight beyond its `num_rows` rows in the period that delivers `step`.

    `before` is their number in the previous period, `limit` their maximum number in this one.
    """
    more = num_rows * (step + 1) // ROWS_PER_DEFERRAL - num_rows * step // ROWS_PER_DEFERRAL
    return min(limit, before + more)


def ramp_up_steps(limit: int, num_rows: int) -> int:
    """Return the steps until a replica that starts with nothing in flight has `limit` sequences beyond its batch."""
    return -(-limit * ROWS_PER_DEFERRAL // num_rows)


_AVERAGED_PERIODS = 8
"""Time constant of the moving average of response lengths, in periods."""

_ROUNDS_PER_WAIT = 1.2
"""Rounds of a single replica per round that it would wait. In simulations it was within 1 % of the best number, with
empty rounds costing a sixth to a half of the mean round, and other ranks busy for half a period to two periods."""

_MAX_FACTOR = 1.5
"""Limit in multiples of the unpaced rounds; more would hardly make periods steadier, and sample tokens too early."""


class Pacer:
    """The minimum rounds of one replica; they decrease if responses are shorter than planned, and never increase."""

    def __init__(self, plan: Plan) -> None:
        self._planned_rounds = planned_rounds(plan)
        self._planned_tokens = self.mean_tokens = plan.facts.workload.sampled_lengths.mean

    @property
    def min_rounds(self) -> int:
        """Minimum rounds of the next period, if each samples one token of a sequence."""
        return int(self._planned_rounds * min(1.0, self.mean_tokens / self._planned_tokens))

    def record_delivered(self, response_tokens: Collection[int]) -> None:
        """Record the lengths of the responses that a period has delivered."""
        if response_tokens:
            self.mean_tokens += (statistics.fmean(response_tokens) - self.mean_tokens) / _AVERAGED_PERIODS


def planned_rounds(plan: Plan) -> float:
    """Return the minimum rounds of a period by the plan; with several replicas, those of an unpaced steady state."""
    placement = plan.placement(GENERATE)
    schedule, dp = placement.schedule, placement.layout.dp
    if not schedule.keeps_in_flight or (dp == 1 and placement.steps_ahead == 0) or plan.facts.workload.turns:
        return 0.0
    num_rows = rows_per_replica(plan.facts, plan.stage(GENERATE), placement.layout)
    overlap = Overlap.of(schedule, dp, num_rows, plan.facts.staleness - placement.steps_ahead)
    rounds = SteadyState(plan.facts.workload).unpaced_rounds(num_rows, schedule.generation_slots, overlap)
    return (
        rounds if dp > 1 else rounds * min(_MAX_FACTOR, _ROUNDS_PER_WAIT * _spare_seconds(plan) / placement.cost.total)
    )


def _spare_seconds(plan: Plan) -> float:
    """Return by how many seconds the busiest other rank works longer than generating ranks do beside generation."""
    generating = plan.pool_of(GENERATE).ranks
    busy = dict.fromkeys(range(plan.facts.cluster.num_ranks), 0.0)
    for placement in plan.placements:
        for rank in plan.pool_of(placement.stage).ranks if placement.stage != GENERATE else ():
            busy[rank] += placement.cost.total
    generating_seconds = max(busy[rank] for rank in generating)
    other_seconds = max((seconds for rank, seconds in busy.items() if rank not in generating), default=0.0)
    return max(0.0, other_seconds - generating_seconds)
