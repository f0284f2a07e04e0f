"""Which prompts a replica admits in the turn that delivers a step, and what that turn waits for.

A replica's prompts are its shares of the prompt batches, one batch after another, whatever the turns are: what is drawn
for a prompt then depends on nothing else. Admission stops with the last step's prompts, so that a run delivers every
sequence it has begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.planner.pace import Pace
from meshwright.planner.plan import Plan
from meshwright.runtime.data import PromptData
from meshwright.runtime.experience import share
from meshwright.runtime.slots import Prompt, Response
from meshwright.runtime.turns import Delivery, Everything, FirstEnded, WholeStep


@dataclass(frozen=True)
class Admitted:
    """What a replica's generator is told in one turn."""

    prompts: tuple[Prompt, ...]
    delivery: Delivery
    least_rounds: int


class Admission:
    """The admission of one replica; every rank of the replica keeps the same."""

    def __init__(self, plan: Plan, data: PromptData, replica: int, steps: range) -> None:
        placement = plan.placement("actor_generate")
        self._data, self._replica, self._steps = data, replica, steps
        self._num_replicas = placement.layout.dp
        self._in_flight, self._overcommits = placement.schedule.batches_in_flight, placement.schedule.overcommit > 0
        self.overcommit = placement.schedule.overcommit
        """Sequences over all replicas beyond a batch; at most the plan's, and none where that has none."""
        self._max_deferral = plan.staleness - placement.lead
        self._per_step = data.batch_size // self._num_replicas
        self._num_admitted = 0
        self._pace = Pace(plan)

    @property
    def num_admitted(self) -> int:
        """Of the replica's prompts from step 0 on, as if the run had begun there."""
        return self._steps.start * self._per_step + self._num_admitted

    @property
    def mean_response_tokens(self) -> float:
        """Of what was delivered lately."""
        return self._pace.mean_tokens

    def resume(self, num_admitted: int, mean_response_tokens: float) -> None:
        """Goes on from where another one stood."""
        self._num_admitted = num_admitted - self._steps.start * self._per_step
        self._pace.mean_tokens = mean_response_tokens

    def of(self, step: int) -> Admitted:
        """What is admitted when `step` is to be delivered; steps are asked for in their order."""
        ahead = self.overcommit // self._num_replicas if self._overcommits else (self._in_flight - 1) * self._per_step
        wanted = (step - self._steps.start + 1) * self._per_step + ahead
        last = max(self._num_admitted, min(wanted, len(self._steps) * self._per_step))
        prompts = tuple(self._prompt(position) for position in range(self._num_admitted, last))
        self._num_admitted = last
        return Admitted(prompts, self._delivery(step), self._pace.least_rounds)

    def delivered(self, responses: Sequence[Response]) -> None:
        """The turn has delivered these."""
        self._pace.delivered([len(response.tokens) for response in responses])

    def rows(self, responses: Sequence[Response]) -> tuple[int, ...]:
        """The rows of the batch that responses fill: their own, or this replica's when they are of several steps."""
        if not self._overcommits:
            return tuple(response.row for response in responses)
        return tuple(range(self._replica, self._data.batch_size, self._num_replicas))

    def _delivery(self, step: int) -> Delivery:
        if self._overcommits:
            return FirstEnded(count=self._per_step, max_deferral=self._max_deferral)
        return WholeStep(step) if self._in_flight > 1 else Everything()

    def _prompt(self, position: int) -> Prompt:
        """The prompt at a position of the replica's row of shares."""
        steps, index = divmod(position, self._per_step)
        return shared(self._data.batch(self._steps.start + steps), self._replica, self._num_replicas)[index]


def shared(prompts: Sequence[Prompt], replica: int, num_replicas: int) -> tuple[Prompt, ...]:
    """A replica's share of prompts that are numbered by row."""
    lengths = {prompt.row: len(prompt.tokens) for prompt in prompts}
    return tuple(prompts[row] for row in share(list(lengths), lengths, replica, num_replicas))
