"""A run: every rank builds its part of the plan, executes the program turn by turn, and rank 0 keeps the record."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from meshwright.planner.program import lower
from meshwright.profiles.documents import digest
from meshwright.profiles.errors import BadInput
from meshwright.profiles.trace import Span
from meshwright.runtime.actions import Actions
from meshwright.runtime.batch import Batch
from meshwright.runtime.computing import Computing
from meshwright.runtime.control import Control
from meshwright.runtime.copies import build_copies, build_refits
from meshwright.runtime.data import PromptData, read_data
from meshwright.runtime.executor import Executor
from meshwright.runtime.experience import Courier
from meshwright.runtime.joining import Place, Seat, join
from meshwright.runtime.launch import launch
from meshwright.runtime.mail import Mail
from meshwright.runtime.memory import bytes_in_use
from meshwright.runtime.offload import HostMemory
from meshwright.runtime.outcome import Outcome
from meshwright.runtime.record import Evaluation, Recorder, RunSummary, elapsed_seconds, observation, observations
from meshwright.runtime.rendezvous import Rendezvous
from meshwright.runtime.reports import Reports
from meshwright.runtime.request import RunRequest, check, check_seat
from meshwright.runtime.resume import load_step, require_shared, save_step
from meshwright.runtime.streaming import Streaming
from meshwright.runtime.underway import Underway

T = TypeVar("T")

EVALUATED = ("actor_generate", "reward_score")


def run_plan(request: RunRequest, rendezvous: Rendezvous | None = None) -> RunSummary | None:
    """Runs the plan on this node's ranks and returns what rank 0 recorded, None on a node without rank 0.

    A process that torchrun has started is one of the ranks; any other launches those of its node. Raises BadInput for
    whatever can be known to be wrong before anything starts.
    """
    rendezvous, cluster = rendezvous or Rendezvous(), request.plan.facts.cluster
    if seat := Seat.of(os.environ):
        place = Place(node_rank=rendezvous.node_rank, work=request.digest, logs=request.out)
        return join(seat, place, partial(check_seat, request, rendezvous, seat), _work, request).get(0)
    if rendezvous.nodes != cluster.nodes:
        raise BadInput(f"--nodes {rendezvous.nodes} does not match the {cluster.nodes} nodes of the plan's cluster.")
    check(request, rendezvous)
    return launch(
        _work,
        request,
        num_ranks=cluster.ranks_per_node,
        rendezvous=rendezvous,
        logs=request.out,
        preload="meshwright.runtime.train",
        work=request.digest,
    ).get(0)


def _work(request: RunRequest) -> RunSummary | None:
    """What one rank does from the first to the last step."""
    if request.plan.facts.cluster.nodes > 1:
        require_shared(request.out)
    run = Run(request)
    # All modules, which are there to stay, or a collection would look at them, for a third of a second on every rank.
    gc.freeze()
    run.recorder.open(run.steps.start)
    if run.steps.start == 0:
        run.evaluate(0)
    for turn in run.turns:
        run.turn(turn)
        done = turn + 1
        if done == request.steps or (done > 0 and request.checkpoint_every and done % request.checkpoint_every == 0):
            run.save(done)
    run.finish()
    run.evaluate(request.steps)
    return run.close()


class Run:
    """One rank's models, program and clock.

    Where stages work ahead, ranks meet in refits and hand-overs alone. A run that is resumed with the same plan takes
    up what was worked ahead and what was in flight; with another one it begins again with that.
    """

    def __init__(self, request: RunRequest) -> None:
        plan, job = request.plan, request.job
        torch.manual_seed(job.ppo.seed)
        bytes_before = bytes_in_use()
        self.data: PromptData = read_data(job, request.directory)
        self._out = request.out
        self._program, self._evaluation = lower(plan), lower(plan, EVALUATED).of_one_step()
        self.copies = build_copies(plan, job, request.directory)
        done, underway = load_step(request.out, self.copies, plan) if request.resume else (0, None)
        self.steps = range(done, request.steps)
        self.turns = self._program.turns(self.steps)
        self._batches: dict[int, Batch] = {}
        self.began = _agree(time.time() - (elapsed_seconds(request.out) if request.resume else 0.0))
        self._host_groups = [_gloo_group() for _ in range(3)]
        self._control = self._host_groups[0]
        reporting, mail = map(Mail, self._host_groups[1:])
        self._reports = Reports(reporting, num_ranks=dist.get_world_size())
        self._controllers = Control(plan, reporting, self.turns, _agree(observations(request.out, self.steps.start)))
        self._host_memory = HostMemory(plan, self.copies)
        self._plan = digest(plan)
        self._actions = Actions(
            plan,
            job,
            self.data,
            self.copies,
            steps=self.steps,
            streaming=Streaming(plan, mail),
            host_memory=self._host_memory,
            control=self._controllers,
        )
        if underway is not None:
            self._resume(underway)
        self._executor = Executor(
            Computing(
                self._actions,
                build_refits(plan, self.copies),
                bytes_before=bytes_before,
                steps=self.steps,
            ),
            Courier(mail),
            self._batch_of,
            rank=dist.get_rank(),
            began=self.began,
            clock="measured",
        )
        self._ended = time.perf_counter()
        """When the last turn did, or what came between it and the next."""
        self.recorder = Recorder(plan, request.out, request.steps, is_writer=dist.get_rank() == 0)

    def turn(self, turn: int) -> Batch:
        """One turn; returns what this rank holds of the experience that it trained on."""
        waited = self._wait_for_all() if self._program.max_lead == 0 else 0.0
        outcome = self._executor.execute(self._program, turn, self.steps)
        ended = time.perf_counter()
        inside = waited + sum(span.seconds for span in outcome.spans)
        self._reports.send(replace(outcome, overhead=1 - inside / (ended - self._ended)))
        self._ended = ended
        if outcomes := self._reports.take(behind=self._program.max_lead):
            self._record(outcomes)
        return self._batches.pop(turn, None) or Batch(step=turn, rows=range(0))

    def _wait_for_all(self) -> float:
        """Returns when all ranks have come; the seconds that took."""
        start = time.perf_counter()
        dist.barrier(group=self._control)
        return time.perf_counter() - start

    def save(self, done: int) -> None:
        """Saves the trainers after `done` updates, and what is under way; the record is complete up to there."""
        self._record_all()
        experience = {step: batch.experience.fields() for step, batch in self._batches.items()}
        underway = Underway(
            plan=self._plan,
            num_steps=self.steps.stop,
            experience=experience,
            drawing=self._actions.drawing(),
        )
        with self._host_memory.trainers_reloaded():
            save_step(self._out, done, self.copies, underway)
        self._ended = time.perf_counter()

    def _resume(self, underway: Underway) -> None:
        for step, fields in underway.experience.items():
            for field, rows in fields.items():
                for row, values in rows.items():
                    self._batch_of(step).experience.put(field, row, values)
        self._actions.resume(underway.drawing, underway.num_steps)

    def finish(self) -> None:
        """Ends with all ranks."""
        self._record_all()
        self._reports.flush()
        self._executor.flush()
        dist.barrier(group=self._control)

    def close(self) -> RunSummary | None:
        """Gives the connections between hosts back. What there is to say of the run, on rank 0."""
        for group in self._host_groups:
            dist.destroy_process_group(group)
        return self.recorder.close()

    def _record_all(self) -> None:
        """Records the turns that rank 0 has not waited for."""
        while outcomes := self._reports.take():
            self._record(outcomes)

    def _record(self, outcomes: Sequence[Outcome]) -> None:
        line = self.recorder.turn(outcomes)
        if line and self._controllers.decides:
            self._controllers.tell(observation(line))

    def _batch_of(self, step: int) -> Batch:
        if step not in self._batches:
            self._batches[step] = Batch(step=step, rows=range(self.data.batch_size))
        return self._batches[step]

    def evaluate(self, step: int) -> None:
        """Scores of the held-out prompts under the present policy, always with the same draws."""
        if not self.data.held_out:
            return
        start = time.time() - self.began
        batch = Batch(step=step, rows=range(len(self.data.held_out)), held_out=True)
        self._batches[step] = batch
        self._executor.execute(self._evaluation, step, range(step, step + 1))
        self._executor.flush()
        del self._batches[step]
        scores = {row: float(batch.experience.get("scores", row)) for row in batch.experience.rows("scores")}
        lengths = {row: batch.length(row) - batch.prompt_length(row) for row in batch.experience.rows("tokens")}
        gathered: list[tuple[Mapping[int, float], Mapping[int, int]]] = self._gather((scores, lengths))
        if not gathered:
            return
        merged_scores = {row: score for part, _ in gathered for row, score in part.items()}
        merged_lengths = {row: length for _, part in gathered for row, length in part.items()}
        end = time.time() - self.began
        span = Span(
            step=step,
            instruction="evaluate",
            kind="evaluate",
            rank=0,
            start_seconds=start,
            end_seconds=end,
            clock="measured",
        )
        self.recorder.evaluation(Evaluation.of(step, merged_scores, merged_lengths), span)
        self._ended = time.perf_counter()

    def _gather(self, mine: T) -> list[T]:
        """Every rank's object on rank 0, nothing elsewhere."""
        gathered: list[T | None] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, gathered, group=self._control)
        return [item for item in gathered or [] if item is not None]


def _gloo_group() -> dist.ProcessGroup:
    """A group of all ranks for messages of the host."""
    group = dist.new_group(backend="gloo")
    assert group is not None
    return group


def _agree(mine: T) -> T:
    """Rank 0's value on every rank."""
    values = [mine]
    dist.broadcast_object_list(values)
    return values[0]
