"""Admission to generation: which prompts a replica admits in the period that delivers a step, and what ends that
period.

A replica's prompts are its shares of the prompt batches, one batch after another. They do not depend on the periods, so
neither does what is sampled for a prompt. Admission stops with the prompts of the last step, so that a run delivers
every sequence it has started.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshwright.cost_models.period_ends import AllSequences, DeliveryRule, FirstEnded, WholeStep, WholeTurns
from meshwright.planner.plan.plan import Plan
from meshwright.planner.simulation.pacing import Pacer, num_deferred
from meshwright.profiles.packing import generation_rows, rows_per_replica
from meshwright.profiles.stages import GENERATE
from meshwright.profiles.trace import NUM_SAMPLED_TOKENS, NUM_SAMPLES
from meshwright.runtime.inference.slots import Prompt, Response
from meshwright.runtime.rollout.prompts import PromptData


@dataclass(frozen=True)
class Admitted:
    """The prompts that a replica's generator gets in one period, and what it has to deliver."""

    prompts: tuple[Prompt, ...]
    delivery: DeliveryRule
    min_rounds: int
    """Minimum number of decode rounds of the period."""


class Admission:
    """The admission of one replica; every rank of the replica computes the same."""

    def __init__(self, plan: Plan, data: PromptData, replica: int, steps: range) -> None:
        placement = plan.placement(GENERATE)
        self._data, self._replica, self._steps = data, replica, steps
        self._num_replicas = placement.layout.dp
        self._in_flight, self._overcommits = placement.schedule.batches_in_flight, placement.schedule.overcommit > 0
        self.overcommit = placement.schedule.overcommit
        """Limit on the sequences in flight beyond a batch, summed over replicas; it may be changed during a run, up to
        the number in the plan."""
        self._max_turns = turns.number.max if (turns := plan.facts.workload.turns) else None
        self._in_waves = plan.facts.workload.selects_samples
        self._max_deferral = plan.staleness - placement.steps_ahead
        """Number of steps by which a response may be delivered late, when the plan overcommits."""
        self._prompts_per_step = rows_per_replica(data.batch_size, self._num_replicas)[replica]
        self._num_admitted, self._step = 0, steps.start
        self._pacer = Pacer(plan)
        workload = plan.facts.workload
        self._tokens_per_round = workload.draft_round(placement.schedule.draft_tokens).sampled
        self._partial_batches: dict[int, tuple[int, int]] = {}
        """The partly delivered prompt batches by step: how many responses of this replica were delivered, and their
        tokens."""

        self._share = lru_cache(maxsize=1)(self._share_of)

    @property
    def num_admitted(self) -> int:
        """The number of admitted prompts of the replica, with those of all steps before the first one of the run."""
        return self._steps.start * self._prompts_per_step + self._num_admitted

    @property
    def mean_response_tokens(self) -> float:
        """The recent mean number of sampled tokens of delivered responses."""
        return self._pacer.mean_tokens

    @property
    def partial_batches(self) -> tuple[tuple[int, int, int], ...]:
        """Partly delivered prompt batches: step, how many responses of this replica were delivered, and their
        tokens."""
        return tuple((step, *counts) for step, counts in self._partial_batches.items())

    @property
    def end_step(self) -> int:
        """The step from which on no replica has admitted any prompt: neither of its batch nor of a later one.

        It follows from the bound on what is admitted early: an overcommit is at most a batch.
        """
        return self._step + self._in_flight + 1

    @property
    def unadmitted(self) -> tuple[int, ...]:
        """The sample ids of this replica's prompts before step `end_step` that are not admitted. Empty if steps are
        sampled in waves."""
        if self._in_waves:
            return ()
        first, last = self._num_admitted, (self.end_step - self._steps.start) * self._prompts_per_step
        return tuple(self._prompt(position).sample_id for position in range(first, last))

    def restore(
        self,
        num_admitted: int,
        mean_response_tokens: float,
        partial_batches: Iterable[tuple[int, int, int]] = (),
        *,
        end_step: int = 0,
    ) -> None:
        """Continue from the state of another admission."""
        self._step = max(self._step, end_step - self._in_flight - 1)
        self._num_admitted = num_admitted - self._steps.start * self._prompts_per_step
        self._pacer.mean_tokens = mean_response_tokens
        self._partial_batches = {step: (count, tokens) for step, count, tokens in partial_batches}

    def admit(self, step: int) -> Admitted:
        """Return what is admitted in the period that delivers `step`; steps must come in order."""
        delivered = (step - self._steps.start) * self._prompts_per_step
        ahead = (self._in_flight - 1) * self._prompts_per_step
        if self._overcommits:
            max_overcommit = self.overcommit // self._num_replicas
            ahead = num_deferred(
                step,
                before=self._num_admitted - delivered,
                limit=max_overcommit,
                num_rows=self._prompts_per_step,
            )
        target = delivered + self._prompts_per_step + ahead
        last = max(self._num_admitted, min(target, len(self._steps) * self._prompts_per_step))
        prompts = tuple(self._prompt(position) for position in range(self._num_admitted, last))
        self._num_admitted, self._step = last, step + 1
        return Admitted(prompts, self._delivery(step), int(self._pacer.min_rounds / self._tokens_per_round))

    def record_delivered(self, responses: Sequence[Response]) -> dict[str, float]:
        """Record the responses that a period has delivered.

        Return statistics of the prompt batches of which this replica's share is now complete: how much was sampled for
        a batch is known only when its longest response is delivered.
        """
        self._pacer.record_delivered([response.num_sampled for response in responses])
        for response in responses:
            count, tokens = self._partial_batches.get(response.step, (0, 0))
            self._partial_batches[response.step] = count + 1, tokens + response.num_sampled
        complete = [step for step, (count, _) in self._partial_batches.items() if count == self._prompts_per_step]
        totals = [self._partial_batches.pop(step) for step in complete]
        if not totals:
            return {}
        return {NUM_SAMPLES: float(sum(n for n, _ in totals)), NUM_SAMPLED_TOKENS: float(sum(n for _, n in totals))}

    def rows(self, responses: Sequence[Response]) -> tuple[int, ...]:
        """Return the rows of the batch that responses fill: their own, or this replica's if they come from several
        steps."""
        if not self._overcommits:
            return tuple(response.row for response in responses)
        return tuple(range(self._replica, self._data.batch_size, self._num_replicas))

    def _delivery(self, step: int) -> DeliveryRule:
        if self._overcommits:
            return FirstEnded(count=self._prompts_per_step, max_deferral=self._max_deferral)
        if self._in_flight == 1:
            return AllSequences()
        return WholeTurns(step, self._in_flight, self._max_turns) if self._max_turns else WholeStep(step)

    def _prompt(self, position: int) -> Prompt:
        """Return the prompt at a position of the replica's concatenated shares; positions must come in order."""
        steps, index = divmod(position, self._prompts_per_step)
        return self._share(self._steps.start + steps)[index]

    def _share_of(self, step: int) -> tuple[Prompt, ...]:
        """Return this replica's share of the prompt batch of a step."""
        return replica_share(self._data.batch(step), self._replica, self._num_replicas, self._data.group_size)


def replica_share(
    prompts: Sequence[Prompt], replica: int, num_replicas: int, group_size: int = 1
) -> tuple[Prompt, ...]:
    """Return a replica's share of prompts that are numbered by row; the samples of a group have consecutive rows."""
    by_row = {prompt.row: prompt for prompt in prompts}
    lengths = {row: len(prompt.tokens) for row, prompt in by_row.items()}
    return tuple(by_row[row] for row in generation_rows(list(lengths), lengths, replica, num_replicas, group_size))
