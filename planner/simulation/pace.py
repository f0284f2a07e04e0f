"""How many rounds a turn of generation lasts at least, so that turns are about equally long.

Sequences that begin together end together: with a slot for every sequence in flight, a turn waits for a whole response
and the next one, whose responses have ended meanwhile, for nothing. Their mean is the plan's, but what runs beside
generation waits in the one and is waited for in the other. So a turn goes on for a number of rounds while something is
left to draw. What it draws beyond its own batch makes the turns that follow shorter. Replicas that wait for each other
go on for as many rounds as the plan counts with; a single one for a fifth more than it would wait, as the plan has it,
for the busiest of the ranks that do not generate: the rounds that are added have fewer sequences than the others.

Nothing is held back where nobody would gain: where a turn is all that its sequences have, and where a single replica
would be waited for.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection

from meshwright.cost_models.turn_cost import Overlap, Turns
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.rules import rows_per_replica
from meshwright.profiles.stages import GENERATE

_MEMORY_TURNS = 8
"""Lengths are averaged over about so many turns."""

_OF_WAIT = 1.2
"""Rounds of a single replica for each that it would wait. Within a hundredth of the best number of rounds where turns
are played whose rounds cost a sixth to a half of their mean when empty, beside ranks busy for half a turn to two."""

_MOST = 1.5
"""Times the planned rounds: with more, turns become hardly steadier, and tokens are drawn earlier than they need be."""


class Pace:
    """The pace of one replica. Responses that are shorter than planned make it faster; longer ones need none."""

    def __init__(self, plan: Plan) -> None:
        self._planned_rounds = planned_rounds(plan)
        self._planned_tokens = self.mean_tokens = plan.facts.workload.drawn_lengths.mean

    @property
    def least_rounds(self) -> int:
        """Of the next turn."""
        return int(self._planned_rounds * min(1.0, self.mean_tokens / self._planned_tokens))

    def delivered(self, response_tokens: Collection[int]) -> None:
        """A turn has delivered responses of these lengths."""
        if response_tokens:
            self.mean_tokens += (statistics.fmean(response_tokens) - self.mean_tokens) / _MEMORY_TURNS


def planned_rounds(plan: Plan) -> float:
    """Rounds of a turn that the plan has time for: at several replicas those in the steady state that it was costed
    with; 0 where no pace is kept."""
    placement = plan.placement(GENERATE)
    schedule, dp = placement.schedule, placement.layout.dp
    if not schedule.runs_on or (dp == 1 and placement.steps_ahead == 0):
        return 0.0
    num_rows = rows_per_replica(plan.facts, plan.stage(GENERATE), placement.layout)
    overlap = Overlap.of(schedule, dp, num_rows, plan.facts.staleness - placement.steps_ahead)
    rounds = Turns(plan.facts.workload).rounds(num_rows, schedule.generation_slots, overlap).num_rounds
    return rounds if dp > 1 else rounds * min(_MOST, _OF_WAIT * _spare_seconds(plan) / placement.cost.total)


def _spare_seconds(plan: Plan) -> float:
    """By which the generating ranks, without generation, are done before the busiest of the others."""
    generating = plan.pool_of(GENERATE).ranks
    busy = dict.fromkeys(range(plan.facts.cluster.num_ranks), 0.0)
    for placement in plan.placements:
        for rank in plan.pool_of(placement.stage).ranks if placement.stage != GENERATE else ():
            busy[rank] += placement.cost.total
    own = max(busy[rank] for rank in generating)
    elsewhere = max((seconds for rank, seconds in busy.items() if rank not in generating), default=0.0)
    return max(0.0, elsewhere - own)
