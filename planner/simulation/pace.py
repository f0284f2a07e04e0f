"""The minimum number of decode rounds of a period, which makes periods about equally long.

Sequences that start together end together: with a slot for every sequence in flight, one period waits for a whole
response and the next one, whose responses have ended by then, for nothing. Their mean is the plan's, but stages that
run concurrently wait in one period and delay the other. A period therefore continues for a number of rounds while
tokens are left to sample; tokens beyond its own batch make the following periods shorter. Replicas that wait for each
other continue for the planned number of rounds. A single replica continues for a fifth more rounds than it would wait,
according to the plan, for the busiest ranks that do not generate: the added rounds have fewer sequences.

There is no minimum where it would not help: if all sequences start and end in one period, or if the others would wait
for a single replica.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection

from meshwright.cost_models.turn_cost import Overlap, SteadyState
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.rules import rows_per_replica
from meshwright.profiles.stages import GENERATE

_MEMORY_TURNS = 8
"""Time constant of the moving average of response lengths, in periods."""

_OF_WAIT = 1.2
"""Rounds of a single replica per round that it would wait. In simulations it was within 1 % of the best number, with
empty rounds costing a sixth to a half of the mean round, and other ranks busy for half a period to two periods."""

_MOST = 1.5
"""Limit in multiples of the planned rounds: more hardly make periods steadier, and sample tokens too early."""


class Pacer:
    """The minimum rounds of one replica; they decrease if responses are shorter than planned, and never increase."""

    def __init__(self, plan: Plan) -> None:
        self._planned_rounds = planned_rounds(plan)
        self._planned_tokens = self.mean_tokens = plan.facts.workload.sampled_lengths.mean

    @property
    def min_rounds(self) -> int:
        """Minimum rounds of the next period."""
        return int(self._planned_rounds * min(1.0, self.mean_tokens / self._planned_tokens))

    def record_delivered(self, response_tokens: Collection[int]) -> None:
        """Record the lengths of the responses that a period has delivered."""
        if response_tokens:
            self.mean_tokens += (statistics.fmean(response_tokens) - self.mean_tokens) / _MEMORY_TURNS


def planned_rounds(plan: Plan) -> float:
    """Return the minimum rounds of a period by the plan; with several replicas, those of its steady state."""
    placement = plan.placement(GENERATE)
    schedule, dp = placement.schedule, placement.layout.dp
    if not schedule.keeps_in_flight or (dp == 1 and placement.steps_ahead == 0):
        return 0.0
    num_rows = rows_per_replica(plan.facts, plan.stage(GENERATE), placement.layout)
    overlap = Overlap.of(schedule, dp, num_rows, plan.facts.staleness - placement.steps_ahead)
    rounds = SteadyState(plan.facts.workload).rounds(num_rows, schedule.generation_slots, overlap).num_rounds
    return rounds if dp > 1 else rounds * min(_MOST, _OF_WAIT * _spare_seconds(plan) / placement.cost.total)


def _spare_seconds(plan: Plan) -> float:
    """Return how much longer the busiest other rank works than the generating ranks without generation."""
    generating = plan.pool_of(GENERATE).ranks
    busy = dict.fromkeys(range(plan.facts.cluster.num_ranks), 0.0)
    for placement in plan.placements:
        for rank in plan.pool_of(placement.stage).ranks if placement.stage != GENERATE else ():
            busy[rank] += placement.cost.total
    generating_seconds = max(busy[rank] for rank in generating)
    other_seconds = max((seconds for rank, seconds in busy.items() if rank not in generating), default=0.0)
    return max(0.0, other_seconds - generating_seconds)
