"""One rank of a run, period by period.

Between periods the rank records metrics and sample responses, evaluates, checkpoints and exports. For its start see
`runtime.execution.start`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from meshwright.planner.job.evaluation import HELD_OUT
from meshwright.planner.program.program import MoveWeights, Program
from meshwright.profiles.trace import Span
from meshwright.runtime.environment.environment import require_scores
from meshwright.runtime.execution.consensus import RankRequest
from meshwright.runtime.execution.executor import steady_now
from meshwright.runtime.execution.held_out import HeldOutPart, evaluation_of
from meshwright.runtime.execution.model_export import TrainedModel, write_models
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.resume import sampling_digests, save_step
from meshwright.runtime.execution.start import broadcast, build, connect, read, recorder_of, restore
from meshwright.runtime.inference.in_flight import InFlightState
from meshwright.runtime.launch.interruption import stop_requested
from meshwright.runtime.messages.experience import StepExperience
from meshwright.runtime.records.kept_responses import SAMPLES_PER_STEP, KeptResponse, write_samples
from meshwright.runtime.records.record import RunSummary, evaluations
from meshwright.runtime.records.restarts import Stopped
from meshwright.runtime.records.results import PeriodResult
from meshwright.runtime.records.run_lines import observation
from meshwright.runtime.rollout.prompts import PromptData


def sample_responses(batch: StepExperience, data: PromptData) -> tuple[KeptResponse, ...]:
    """Return the first responses of a batch, of those whose fields this rank has all received.

    With groups they answer one prompt.
    """
    return tuple(_sample(batch, data, row) for row in batch.rows[:SAMPLES_PER_STEP])


def _sample(batch: StepExperience, data: PromptData, row: int) -> KeptResponse:
    tokens, first = batch.experience.get("tokens", row).tolist(), batch.prompt_length(row)
    return KeptResponse(
        step=batch.step,
        row=row,
        prompt=data.text(tokens[:first]),
        response=data.text(tokens[first:]),
        score=float(batch.score(row)),
        response_tokens=len(tokens) - first,
        truncated=bool(batch.experience.get("truncated", row)),
    )


T = TypeVar("T")


class RankRun:
    """The models, program and clock of one rank.

    Where stages run ahead, ranks synchronise only in refits and transfers.
    """

    def __init__(self, request: RunRequest) -> None:
        torch.manual_seed(request.job.settings.seed)
        inputs = read(request)
        models = build(request, inputs)
        progress = restore(request, inputs, models)
        connections = connect(request, inputs, models, progress)

        self._request = request
        self._program = inputs.program
        self._evaluations = inputs.evaluations
        self.copies = models.copies
        self.data = progress.data
        self.steps = progress.steps
        self.periods = progress.periods
        self.start_seconds = progress.start_seconds
        self._keeps_samples = progress.keeps_samples
        self._groups = connections.groups
        self._control_group = connections.control
        self._saver = connections.saver
        self._reports = connections.reports
        self._controllers = connections.controllers
        self._consensus = connections.consensus
        self._host_memory = connections.host_memory
        self._environment = connections.environment
        self._evaluation_environments = connections.evaluation_environments
        self._tools = connections.tools
        self._batches = connections.batches
        self._stages = connections.stages
        self._watch = connections.watch
        self._executor = connections.executor
        self._evaluator = connections.evaluator
        self._next_plan = connections.next_plan
        self._saved = progress.steps.start if request.resume else None
        """Number of updates in the newest checkpoint."""
        self._saved_at = time.monotonic()
        self._agreed, self._waited = RankRequest(), 0.0
        self._ended = time.perf_counter()
        """Time at which the last period ended, or the evaluation, checkpoint or export after it."""
        self._engine = models.engine
        self.recorder = recorder_of(request, models, progress, connections.engine_facts)

    def run_period(self, period: int) -> StepExperience:
        """Execute one period; return what this rank holds of the experience that it trained on.

        It returns once the checkpoint that was started before the period is on disk, so that a failure never loses more
        steps than lie between two checkpoints.
        """
        outcome = self._executor.execute(self._program, period, self.steps)
        ended = time.perf_counter()
        self._watch.record_period(ended - self._ended)
        accounted = self._waited + sum(span.seconds for span in outcome.spans)
        overhead = 1 - accounted / (ended - self._ended)
        self.wait_for_checkpoint(period)
        self._ended = time.perf_counter()
        self._reports.send(replace(outcome, overhead=overhead))
        with self._watch.waiting("the reports of a period", period):
            outcomes = self._reports.take(leave=self._program.max_steps_ahead)
        if outcomes:
            self._record(outcomes)
        self._reach_consensus(period)
        if self._environment:
            self._environment.drop_step(period)
        batch = self._batches.by_step.pop(period, None) or StepExperience(step=period, rows=range(0))
        if self._keeps_samples and _is_due(period, self._request.sample_every) and batch.rows:
            write_samples(self._request.out, sample_responses(batch, self.data))
        return batch

    def _reach_consensus(self, period: int) -> None:
        """Send this rank's request to all ranks; in a synchronous plan, wait for theirs."""
        start, minutes = time.monotonic(), self._request.checkpoint_minutes
        is_due = dist.get_rank() == 0 and 0 < minutes * 60 <= start - self._saved_at
        done = max(period + 1, self.steps.start)
        mine = self._next_plan.request(done, self._saver.seconds) if self._next_plan else RankRequest()
        with self._watch.waiting("the consensus after a period", period):
            self._agreed = self._consensus.after_period(mine._replace(save=mine.save or is_due, stop=stop_requested()))
        self._waited = time.monotonic() - start if self._program.max_steps_ahead == 0 else 0.0

    def after_period(self, done: int) -> bool:
        """Evaluate, checkpoint and export where due after `done` updates; return True if all ranks stop here.

        An evaluated policy is always checkpointed, so that the best one can be kept.
        """
        request, has_trained = self._request, done > self.steps.start
        is_last = done == request.steps
        intervals = {name: request.job.evaluation.interval(name) for name in self.data.held_out}
        due = [name for name, every in intervals.items() if has_trained and not is_last and _is_due(done, every)]
        self.evaluate(done, due)
        by_steps = bool(due) or _is_due(done, request.checkpoint_every)
        if has_trained and (is_last or by_steps or self._agreed.save or self._agreed.ends):
            self.save(done)
        if has_trained and request.export_every and (is_last or _is_due(done, request.export_every)):
            self.export(done)
        return self._agreed.ends and not is_last

    def stop(self, done: int) -> Stopped:
        """End on all ranks before the last step.

        Messages sent ahead are dropped, except weights: they are received, or their sender would block.
        """
        with self._watch.collective("the end of the run", done):
            self._record_all()
            self._consensus.flush()
        moves = tuple(i for i in self._program.instructions if isinstance(i, MoveWeights))
        self._executor.execute(Program(moves), done, range(done, done + 1))
        self.wait_for_checkpoint(done)
        continues = self._agreed.replan and not self._agreed.stop
        if self._next_plan:
            self._next_plan.close()
            if continues:
                self._next_plan.write(done)
        with self._watch.collective("the end of the run", done):
            dist.barrier(group=self._control_group)
        self._watch.close()
        if self._tools:
            self._tools.close()  # otherwise the process would wait for every queued call
        if self._engine:
            self._engine.close()
        self.recorder.stop()
        return Stopped(done=max(done, self.steps.start), saved=self._saved, continues=continues)

    def save(self, done: int) -> None:
        """Checkpoint the trainers and the in-flight state after `done` updates; first complete the record up to it."""
        self._record_all()
        if self._environment:
            with self._watch.collective("the rewards of steps ahead", done):
                for batch in self._batches.by_step.values():
                    self._environment.put_scores(batch)
        experience = {step: batch.experience.fields() for step, batch in self._batches.by_step.items()}
        in_flight = InFlightState(
            digests=sampling_digests(self._request.plan, self._request.job),
            num_steps=self.steps.stop,
            experience=experience,
            generation=self._stages.snapshot(),
            # Batches of later steps to which a change of the plan has assigned other prompts.
            reassigned={step: samples for step, samples in self.data.reassigned.items() if step >= done},
            selection={step: batch.selection for step, batch in self._batches.by_step.items()},
        )
        with self._watch.collective("the checkpoint", done), self._host_memory.trainers_reloaded():
            save_step(
                self._saver,
                self._request.out,
                done,
                self.copies,
                in_flight,
                keep=self._request.keep,
                prompt_sets={name: self._digest_of(name) for name in self.data.held_out},
            )
        self._saved, self._saved_at = done, time.monotonic()
        self._ended, self._waited = time.perf_counter(), 0.0

    def wait_for_checkpoint(self, done: int) -> None:
        """Wait until the last checkpoint that was started is on disk."""
        with self._watch.collective("the checkpoint", done):
            self._saver.wait()

    def export(self, done: int) -> None:
        """Write the trained models after `done` updates as Hugging Face directories, beside the checkpoints."""
        plan, target = self._request.plan, self._request.out / "models" / f"step-{done:06d}"
        if dist.get_rank() == 0:
            shutil.rmtree(target, ignore_errors=True)  # an export of the same step, from before the run was resumed
        dist.barrier(group=self._control_group)
        copies = ((role, self.copies[stage]) for role, stage in plan.graph.train_stage.items())
        trained = (
            TrainedModel(role=role, spec=plan.facts.models.spec(role), mesh=copy.mesh, model=copy.model)
            for role, copy in copies
        )
        with self._watch.collective("the export", done), self._host_memory.trainers_reloaded():
            write_models(trained, self._request.job, self._request.directory, target)
        self._ended = time.perf_counter()

    def finish(self) -> None:
        """End the run on all ranks after its last step."""
        self.wait_for_checkpoint(self.steps.stop)
        with self._watch.collective("the end of the run", self.steps.stop):
            self._record_all()
            self._consensus.flush()
            self._reports.flush()
            self._executor.flush()
            dist.barrier(group=self._control_group)

    def close(self) -> RunSummary | None:
        """Close process groups, rewards and tools; return the summary of the run on rank 0, None elsewhere."""
        self._watch.close()
        if self._next_plan:
            self._next_plan.close()
        for environment in (self._environment, *self._evaluation_environments.values()):
            if environment:
                environment.close()
        if self._tools:
            self._tools.close()
        if self._engine:
            self._engine.close()
        for group in self._groups:
            dist.destroy_process_group(group)
        return self.recorder.close()

    def _record_all(self) -> None:
        """Record the periods that rank 0 has not waited for."""
        while outcomes := self._reports.take():
            self._record(outcomes)

    def _record(self, outcomes: Sequence[PeriodResult]) -> None:
        line = self.recorder.record_period(outcomes)
        if line and self._controllers.has_active_controllers:
            self._controllers.send_observation(observation(line))

    def not_evaluated(self, step: int) -> list[str]:
        """Return the held-out sets on which the policy after `step` updates was not evaluated, in this run or before
        it was resumed."""
        done = broadcast(lambda: {one.prompt_set for one in evaluations(self._request.out) if one.step == step})
        return [name for name in self.data.held_out if name not in done]

    def evaluate(self, step: int, names: Sequence[str] | None = None) -> None:
        """Score responses to held-out sets, by default to all, under the present policy, always with the same random
        numbers."""
        for name in self.data.held_out if names is None else names:
            self._evaluate(step, name)

    def _evaluate(self, step: int, name: str) -> None:
        start = steady_now() - self.start_seconds
        prompts, evaluation = self.data.held_out[name], self._request.job.evaluation
        batch = StepExperience(step=step, rows=range(len(prompts.prompts)), held_out=name)
        has_own_rewards = bool(evaluation.own_rewards(name))
        environment = self._evaluation_environments.get(name) if has_own_rewards else self._environment
        with self._batches.only(batch), self._watch.evaluation(len(batch.rows)):
            self._evaluator.execute(self._evaluations[name], step, range(step, step + 1))
            self._evaluator.flush()
            if environment:
                environment.put_scores(batch)
                require_scores(batch.experience)
        with self._watch.collective("the evaluation", step):
            gathered = self._gather(HeldOutPart.of(batch, self._request.job))
        if not gathered:
            return
        end = steady_now() - self.start_seconds
        span = Span(
            step=step,
            instruction="evaluate" if name == HELD_OUT else f"evaluate {name}",
            kind="evaluate",
            rank=0,
            start_seconds=start,
            end_seconds=end,
            clock="measured",
        )
        record = evaluation_of(gathered, step, self._request.job, name)
        self.recorder.record_evaluation(replace(record, prompts=self._digest_of(name)), span)
        self._ended, self._waited = time.perf_counter(), 0.0

    def _digest_of(self, name: str) -> str:
        """Return the digest of what decides the scores on a set of held-out prompts besides the policy."""
        return self._request.job.evaluation.digest(name, self.data.held_out[name].digest)

    def _gather(self, mine: T) -> list[T]:
        """Return the objects of all ranks on rank 0, an empty list elsewhere."""
        gathered: list[T | None] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, gathered, group=self._control_group)
        return [item for item in gathered or [] if item is not None]


def _is_due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0
