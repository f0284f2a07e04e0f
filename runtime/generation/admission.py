"""Which prompts a replica admits in the turn that delivers a step, and what that turn waits for.

A replica's prompts are its shares of the prompt batches, one batch after another, whatever the turns are: what is drawn
for a prompt then depends on nothing else. Admission stops with the last step's prompts, so that a run delivers every
sequence it has begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.planner.plan.plan import Plan
from meshwright.planner.simulation.deferral import held_back
from meshwright.planner.simulation.flight import Delivery, Everything, FirstEnded, WholeStep
from meshwright.planner.simulation.pace import Pace
from meshwright.profiles.packing import rows_of_replicas
from meshwright.profiles.stages import GENERATE
from meshwright.profiles.trace import NUM_DRAWN, NUM_DRAWN_TOKENS
from meshwright.runtime.generation.prompts import PromptData
from meshwright.runtime.generation.slots import Prompt, Response
from meshwright.runtime.messages.experience import share


@dataclass(frozen=True)
class Admitted:
    """What a replica's generator is told in one turn."""

    prompts: tuple[Prompt, ...]
    delivery: Delivery
    least_rounds: int


class Admission:
    """The admission of one replica; every rank of the replica keeps the same."""

    def __init__(self, plan: Plan, data: PromptData, replica: int, steps: range) -> None:
        placement = plan.placement(GENERATE)
        self._data, self._replica, self._steps = data, replica, steps
        self._num_replicas = placement.layout.dp
        self._in_flight, self._overcommits = placement.schedule.batches_in_flight, placement.schedule.overcommit > 0
        self.overcommit = placement.schedule.overcommit
        """Sequences over all replicas beyond a batch, once so many are held back; at most the plan's."""
        self._in_waves = plan.facts.workload.chooses
        self._max_deferral = plan.staleness - placement.steps_ahead
        self._per_step = rows_of_replicas(data.batch_size, self._num_replicas)[replica]
        self._num_admitted, self._step = 0, steps.start
        self._pace = Pace(plan)
        self._batches: dict[int, tuple[int, int]] = {}
        """Of prompt batches that are not delivered whole: how many of this replica's are, and their tokens."""

        self._share: tuple[int, tuple[Prompt, ...]] = -1, ()
        """Of this replica in the prompt batch that was asked for last."""

    @property
    def num_admitted(self) -> int:
        """Of the replica's prompts from step 0 on, as if the run had begun there."""
        return self._steps.start * self._per_step + self._num_admitted

    @property
    def mean_response_tokens(self) -> float:
        """Of what was delivered lately."""
        return self._pace.mean_tokens

    @property
    def batches_in_part(self) -> tuple[tuple[int, int, int], ...]:
        """Prompt batches that are not delivered whole: step, how many of this replica's are, and their tokens."""
        return tuple((step, *found) for step, found in self._batches.items())

    @property
    def until(self) -> int:
        """A step that no batch has been admitted of, the same on all replicas: an overcommit is a batch at most."""
        return self._step + self._in_flight + 1

    @property
    def left(self) -> tuple[int, ...]:
        """The draws of this replica's prompts before that step that are not admitted; waves are dealt elsewhere."""
        if self._in_waves:
            return ()
        first, last = self._num_admitted, (self.until - self._steps.start) * self._per_step
        return tuple(self._prompt(position).draw for position in range(first, last))

    def resume(
        self,
        num_admitted: int,
        mean_response_tokens: float,
        batches_in_part: Iterable[tuple[int, int, int]] = (),
        *,
        until: int = 0,
    ) -> None:
        """Goes on from where another one stood."""
        self._step = max(self._step, until - self._in_flight - 1)
        self._num_admitted = num_admitted - self._steps.start * self._per_step
        self._pace.mean_tokens = mean_response_tokens
        self._batches = {step: (count, tokens) for step, count, tokens in batches_in_part}

    def of(self, step: int) -> Admitted:
        """What is admitted when `step` is to be delivered; steps are asked for in their order."""
        delivered = (step - self._steps.start) * self._per_step
        ahead = (self._in_flight - 1) * self._per_step
        if self._overcommits:
            most = self.overcommit // self._num_replicas
            ahead = held_back(step, self._num_admitted - delivered, most, self._per_step)
        wanted = delivered + self._per_step + ahead
        last = max(self._num_admitted, min(wanted, len(self._steps) * self._per_step))
        prompts = tuple(self._prompt(position) for position in range(self._num_admitted, last))
        self._num_admitted, self._step = last, step + 1
        return Admitted(prompts, self._delivery(step), self._pace.least_rounds)

    def delivered(self, responses: Sequence[Response]) -> dict[str, float]:
        """The turn has delivered these. Of the prompt batches that are now delivered whole, this replica's share: what
        was drawn for a prompt batch is known when its longest response is."""
        self._pace.delivered([response.num_drawn for response in responses])
        for response in responses:
            count, tokens = self._batches.get(response.step, (0, 0))
            self._batches[response.step] = count + 1, tokens + response.num_drawn
        whole = [step for step, (count, _) in self._batches.items() if count == self._per_step]
        found = [self._batches.pop(step) for step in whole]
        if not found:
            return {}
        return {NUM_DRAWN: float(sum(n for n, _ in found)), NUM_DRAWN_TOKENS: float(sum(n for _, n in found))}

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
        """The prompt at a position of the replica's row of shares, which is asked for in order."""
        steps, index = divmod(position, self._per_step)
        step = self._steps.start + steps
        if self._share[0] != step:
            prompts = self._data.batch(step)
            self._share = step, shared(prompts, self._replica, self._num_replicas, self._data.group_size)
        return self._share[1][index]


def shared(prompts: Sequence[Prompt], replica: int, num_replicas: int, group_size: int = 1) -> tuple[Prompt, ...]:
    """A replica's share of prompts that are numbered by row, those of a group one behind the other."""
    by_row = {prompt.row: prompt for prompt in prompts}
    lengths = {row: len(prompt.tokens) for row, prompt in by_row.items()}
    return tuple(by_row[row] for row in share(list(lengths), lengths, replica, num_replicas, group_size))
