"""The device of a rank in a rehearsal, which waits where a real device would compute.

It synchronises with the other ranks of a stage, waits for the predicted time, and writes experience of the right
sizes. It fails where the real device would: when a rank of the pool is missing, or when a stage lacks what it reads.
"""

from __future__ import annotations

import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable

import torch

from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.reward_workers import host_seconds
from meshwright.planner.program.durations import Durations
from meshwright.planner.program.program import MoveWeights
from meshwright.planner.simulation.sampled_durations import sample_lengths
from meshwright.profiles.errors import RunFailed
from meshwright.profiles.packing import assigned_rows, generation_rows
from meshwright.profiles.stages import GENERATE, KEPT_TOKENS, Stage, field_type
from meshwright.profiles.trace import instruction_name
from meshwright.runtime.messages.experience import Experience, StepExperience
from meshwright.runtime.messages.streaming import Streaming, TokenChunk
from meshwright.runtime.messages.transport import Barriers
from meshwright.runtime.records.results import InstructionResult


class RehearsalDevice:
    """The rehearsed device of one rank.

    `speed` multiplies every wait: 0.1 rehearses in a tenth of the time. Lengths are sampled from `seed`.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        barriers: Barriers,
        durations: Durations,
        streaming: Streaming,
        *,
        speed: float,
        seed: int,
    ) -> None:
        self._plan, self._rank, self._barriers, self._speed = plan, rank, barriers, speed
        self._streaming = streaming
        self._transfer_seconds = {edge.consumer: edge.cost.total for edge in plan.edges if edge.producer == GENERATE}
        self._work = functools.cache(durations.of_step)
        self._lengths = functools.cache(functools.partial(_sampled_lengths, plan, seed))
        self._period, self._free_at = 0, 0.0
        self._scored_at: dict[int, float] = {}
        self._unsent: queue.SimpleQueue[tuple[float, Experience, Callable[[Experience], object]]] = queue.SimpleQueue()
        if plan.workers:
            threading.Thread(target=self._send, name="rewards", daemon=True).start()

    def begin(self, period: int) -> None:
        """Begin a period."""
        self._period = period

    def run_stage(self, stage: str, batch: StepExperience) -> InstructionResult:
        """Synchronise with the stage's ranks, be busy for its predicted time, and write zeros of the right sizes.

        Raises RunFailed if rows of a field that the stage reads are missing.
        """
        if stage in self._streaming.readers:
            return self._read_while_generated(stage, batch)
        stage_spec, pool = self._plan.stage(stage), self._plan.pool_of(stage)
        self._require_inputs(stage_spec, batch)
        coordinates = self._plan.placement(stage).layout.coordinates(self._rank - pool.first_rank)
        self._occupy(stage, batch.step, tuple(pool.ranks), coordinates.dp)
        rows = self._rows(stage_spec, batch, coordinates.dp)
        if stage_spec.generates:
            self._stream(batch, rows)
        if stage_spec.generates or coordinates.pp == self._plan.placement(stage).layout.pp - 1:
            self._write(stage_spec, batch, rows)
        return self._result(batch, rows)

    def refit(self, source: str, target: str) -> InstructionResult:
        """Synchronise with the ranks of both stages and be busy for the predicted time of the refit."""
        ranks = {*self._plan.pool_of(source).ranks, *self._plan.pool_of(target).ranks}
        self._occupy(instruction_name(MoveWeights.kind, source, target), max(self._period, 0), tuple(sorted(ranks)), 0)
        return InstructionResult()

    def when_scored(self, batch: StepExperience, send: Callable[[Experience], object]) -> None:
        """Call `send` with scores from another thread, once the predicted time of the hosts has passed."""
        sampled = self._work(batch.step).host_seconds
        seconds = max(host_seconds(edge) for edge in self._plan.edges) if sampled is None else sampled
        self._scored_at[batch.step] = time.monotonic() + seconds * self._speed
        scores = Experience()
        _put_zeros(scores, self._plan.graph.host_stages[0].writes, self._generated_rows(batch))
        self._unsent.put((self._scored_at[batch.step], scores, send))

    def _send(self) -> None:
        """Send the scores in the order of the steps."""
        while True:
            scored_at, scores, send = self._unsent.get()
            time.sleep(max(0.0, scored_at - time.monotonic()))
            send(scores)

    def put_scores(self, batch: StepExperience) -> None:
        """Wait until the hosts are predicted to be done, and put zeros for their scores."""
        time.sleep(max(0.0, self._scored_at.pop(batch.step) - time.monotonic()))
        _put_zeros(batch.experience, self._plan.graph.host_stages[0].writes, self._generated_rows(batch))

    def _generated_rows(self, batch: StepExperience) -> tuple[int, ...]:
        """Return the rows that this rank's replica has generated."""
        layout, first = self._plan.placement(GENERATE).layout, self._plan.pool_of(GENERATE).first_rank
        return self._rows(self._plan.stage(GENERATE), batch, layout.coordinates(self._rank - first).dp)

    def synchronise(self) -> None:
        """Wait until the device is no longer busy."""
        time.sleep(max(0.0, self._free_at - time.monotonic()))

    def _stream(self, batch: StepExperience, rows: tuple[int, ...]) -> None:
        """Send all chunks at once when the stage starts, in their right sizes, and the last message when it ends."""
        prompts, responses = self._lengths(batch.step)
        sequence_ids = {row: batch.step * len(batch.rows) + row for row in rows}
        for sending in self._streaming.sending:
            sending.sender.send(TokenChunk(sequence_ids[row], (0,) * prompts[row]) for row in rows)
            for first in range(0, max(responses[row] for row in rows), sending.chunk_tokens):
                remaining = {row: responses[row] - first for row in rows if responses[row] > first}
                sending.sender.send(
                    TokenChunk(
                        sequence_ids[row], (0,) * min(left, sending.chunk_tokens), is_last=left <= sending.chunk_tokens
                    )
                    for row, left in remaining.items()
                )
        if self._streaming.sending:
            self.synchronise()
        for sending in self._streaming.sending:
            sending.sender.end({sequence_id: row for row, sequence_id in sequence_ids.items()})

    def _read_while_generated(self, stage: str, batch: StepExperience) -> InstructionResult:
        """Be busy from the first message on, and at least for the transfer and the stage's tail after the last one."""
        stage_spec, placement, pool = self._plan.stage(stage), self._plan.placement(stage), self._plan.pool_of(stage)
        coordinates = placement.layout.coordinates(self._rank - pool.first_rank)
        messages = self._streaming.readers[stage].messages()
        last = next(messages)
        self._occupy(stage, batch.step, tuple(pool.ranks), coordinates.dp)
        for message in messages:
            last = message
        tail = self._work(batch.step).tail_seconds.get(stage, placement.tail_seconds)
        remaining = self._transfer_seconds[stage] + tail
        self._free_at = max(self._free_at, time.monotonic() + remaining * self._speed)
        rows = tuple(sorted((last.delivered or {}).values()))
        if coordinates.pp == placement.layout.pp - 1:
            self._write(stage_spec, batch, rows)
        return self._result(batch, rows)

    def _result(self, batch: StepExperience, rows: tuple[int, ...]) -> InstructionResult:
        return InstructionResult(facts={"num_tokens": float(sum(self._length(batch, row) for row in rows))})

    def _occupy(self, name: str, step: int, ranks: tuple[int, ...], replica: int) -> None:
        """Synchronise with the other ranks, then mark the device as busy; do neither for work that takes no time."""
        seconds = self._work(step).seconds[name]
        if any(seconds):
            self._barriers.wait(ranks)
            busy = seconds[replica] if len(seconds) > 1 else seconds[0]
            self._free_at = time.monotonic() + busy * self._speed

    def _require_inputs(self, stage: Stage, batch: StepExperience) -> None:
        for field in stage.reads:
            if batch.experience.rows(field) != tuple(batch.rows):
                raise RunFailed(f"rank {self._rank} lacks rows of {field} for {stage.name}; the program is not sound.")

    def _rows(self, stage: Stage, batch: StepExperience, replica: int) -> tuple[int, ...]:
        """Return the rows of this rank's replica, split over replicas as in a run."""
        if not stage.generates and not self._plan.placement(stage.name).schedule.chunk_tokens:
            return assigned_rows(batch.rows, batch.lengths(), replica, self._plan.row_split_of(stage.name))
        prompts, _ = self._lengths(batch.step)
        lengths = dict(enumerate(prompts)) if stage.generates else batch.lengths()
        dp, group_size = self._plan.placement(stage.name).layout.dp, self._plan.facts.workload.group_size
        return generation_rows(batch.rows, lengths, replica, dp, group_size if stage.generates else 1)

    def _write(self, stage: Stage, batch: StepExperience, rows: tuple[int, ...]) -> None:
        for field in stage.writes:
            for row in rows:
                values = field_type(field)
                size = int(values.num_values(*self._row_lengths(batch, row), stage.top_tokens))
                size *= self._plan.facts.workload.kept_tokens if field == KEPT_TOKENS else 1
                batch.experience.put(field, row, torch.zeros(size, dtype=getattr(torch, values.dtype)))

    def _length(self, batch: StepExperience, row: int) -> int:
        return sum(self._row_lengths(batch, row))

    def _row_lengths(self, batch: StepExperience, row: int) -> tuple[int, int]:
        """Return the tokens of the prompt and of the response of a row."""
        prompts, responses = self._lengths(batch.step)
        return prompts[row], responses[row]


def _put_zeros(experience: Experience, fields: Iterable[str], rows: Iterable[int]) -> None:
    for field, row in itertools.product(fields, rows):
        experience.put(field, row, torch.zeros(1, dtype=getattr(torch, field_type(field).dtype)))


def _sampled_lengths(plan: Plan, seed: int, step: int) -> tuple[list[int], list[int]]:
    """Return the tokens of the prompts and of the responses of a step, by row."""
    prompts, responses = sample_lengths(plan.facts.workload, seed=seed, step=step)
    return prompts.tolist(), responses.tolist()
