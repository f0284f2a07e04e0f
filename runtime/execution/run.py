"""One rank of a run.

Its part of the plan is built once and executed period by period. Between periods the rank records metrics and sample
responses, evaluates, checkpoints and exports.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.durations import failing_call_seconds
from meshwright.planner.program.program import MoveWeights, Program, lower, output_owners, split_waves
from meshwright.profiles.stages import GENERATE, Role
from meshwright.profiles.trace import Span
from meshwright.runtime.device import host
from meshwright.runtime.device.capabilities import device_capabilities
from meshwright.runtime.device.process_groups import collective_timeout
from meshwright.runtime.device.used_memory import bytes_in_use
from meshwright.runtime.environment.environment import build_environment, require_scores, startup_notes
from meshwright.runtime.environment.worker_pool import ToolWorkers
from meshwright.runtime.execution.consensus import Consensus, RankRequest
from meshwright.runtime.execution.executor import Executor, steady_now
from meshwright.runtime.execution.held_out import EVALUATED_FIELDS, HeldOutPart, evaluation_of
from meshwright.runtime.execution.megatron_device import MegatronDevice, StageRunner
from meshwright.runtime.execution.model_export import TrainedModel, write_models
from meshwright.runtime.execution.replanning import NextPlan
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.resume import (
    LoadedState,
    ResumePolicy,
    changes,
    load_step,
    sampling_digests,
    save_step,
)
from meshwright.runtime.execution.sample_selection import GroupSampling, SampleFilter
from meshwright.runtime.execution.watchdog import RunWatch
from meshwright.runtime.inference.in_flight import InFlightState
from meshwright.runtime.launch.interruption import stop_requested
from meshwright.runtime.messages.experience import ExperienceTransport, StepExperience
from meshwright.runtime.messages.streaming import Streaming
from meshwright.runtime.messages.transport import Reports, Transport
from meshwright.runtime.model.kernel_choice import ChosenKernels, agree_on_kernels, choose_kernels
from meshwright.runtime.records.kept_responses import SAMPLES_PER_STEP, KeptResponse, drop_samples, write_samples
from meshwright.runtime.records.record import Recorder, RunSummary, evaluations
from meshwright.runtime.records.restarts import Stopped
from meshwright.runtime.records.results import PeriodResult
from meshwright.runtime.records.run_directory import RunFile, read_run_file
from meshwright.runtime.records.run_lines import elapsed_seconds, observation, observations
from meshwright.runtime.rollout.controllers import RunControllers
from meshwright.runtime.rollout.prompts import PromptData, read_data
from meshwright.runtime.training.checkpoint import Saver
from meshwright.runtime.training.offload import OffloadedStages
from meshwright.runtime.training.weight_copies import build_copies, build_refits, restore_versions


def sample_responses(batch: StepExperience, data: PromptData) -> tuple[KeptResponse, ...]:
    """Return the first rows of a batch that this rank holds in full; with groups they answer one prompt."""
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

    Where stages run ahead, ranks synchronise only in refits and transfers. A run that is resumed with the same plan
    restores the stages that ran ahead and the sequences in flight; with another plan, only the sampled tokens.
    """

    def __init__(self, request: RunRequest) -> None:
        plan, job = request.plan, request.job
        torch.manual_seed(job.settings.seed)
        bytes_before = bytes_in_use()
        data = read_data(job, request.directory)
        self._request = request
        self._program, self._evaluation = (
            split_waves(lower(plan), plan),
            lower(plan, _evaluation_stages(plan)).synchronous(),
        )
        self._kernels = _kernels(plan)
        self.copies = build_copies(plan, job, request.directory, data.num_tokens, self._kernels)
        resumption = ResumePolicy(plan=plan, job=job, resample=request.resample)
        loaded = load_step(request.out, self.copies, resumption) if request.resume else LoadedState()
        migrated = loaded.migrated
        self.data: PromptData = replace(
            data, reassigned=migrated.reassigned, num_wave_prompts=migrated.num_wave_prompts
        )
        done = loaded.step
        restore_versions(self.copies, done)
        self.steps = range(done, request.steps)
        self.periods = self._program.periods(self.steps)
        self._batches: dict[int, StepExperience] = {}
        self.start_seconds = _broadcast(
            lambda: steady_now() - (elapsed_seconds(request.out) if request.resume else 0.0)
        )
        self._host_groups = [_gloo_group() for _ in range(5)]
        self._control, self._saver = self._host_groups[0], Saver(self._host_groups[1])
        reporting, transport, evaluating = map(Transport, self._host_groups[2:])
        self._reports = Reports(reporting, num_ranks=dist.get_world_size())
        observations_so_far = _broadcast(lambda: observations(request.out, self.steps.start))
        self._controllers = RunControllers(plan, reporting, self.periods, observations_so_far)
        self._host_memory = OffloadedStages(plan, self.copies)
        actor = self.copies[plan.graph.train_stage[Role.ACTOR]]
        self._keeps_samples = self.data.tokenizer is not None and dist.get_rank() == actor.mesh.ranks[0]
        """True on the rank that writes sample responses; it holds every field that it trains on."""
        if self._keeps_samples:
            drop_samples(request.out, done)
        scores_here = job.rewards and dist.get_rank() in output_owners(plan, GENERATE)
        self._environment = build_environment(plan, job.rewards) if scores_here else None
        calls_tool = plan.facts.workload.turns and self.copies[plan.copy_of(GENERATE)].mesh.is_first_of_replica
        self._tools = ToolWorkers(job.tool) if job.tool and calls_tool else None
        self._actions = StageRunner(
            plan,
            job,
            self.data,
            self.copies,
            steps=self.steps,
            streaming=Streaming(plan, transport),
            host_memory=self._host_memory,
            control=self._controllers,
            out=request.out,
            environment=self._environment,
            tools=self._tools,
        )
        self._actions.migrate(migrated.samples)
        if loaded.in_flight is not None:
            self._restore(loaded.in_flight)
        device = MegatronDevice(
            self._actions, build_refits(plan, self.copies), bytes_before=bytes_before, steps=self.steps
        )
        self._watch = RunWatch(
            plan, request.out, self.start_seconds, timeout_seconds=failing_call_seconds(plan, job.rewards, job.tool)
        )
        # Messages of an evaluation must not be mistaken for those of a later period, so it has a transport of its own.
        self._executor, self._evaluator = (self._executor_of(device, one) for one in (transport, evaluating))
        self._saved = done if request.resume else None
        """Number of updates in the newest checkpoint."""
        self._saved_at = time.monotonic()
        self._consensus = Consensus(self._control, most_ahead=self._program.most_ahead)
        self._agreed, self._waited, self._next_plan = RankRequest(), 0.0, NextPlan.for_rank(request, done)
        dist.barrier(group=self._control)
        self._ended = time.perf_counter()
        """Time at which the last period ended, or the evaluation, checkpoint or export after it."""
        self.recorder = self._recorder(request, loaded.notes)

    def _executor_of(self, device: MegatronDevice, messages: Transport) -> Executor:
        """Return the executor of programs on this rank's device."""
        plan, job = self._request.plan, self._request.job
        selection = GroupSampling.of(plan, job) or SampleFilter.of(plan, job)
        return Executor(
            device,
            ExperienceTransport(messages),
            self._batch_of,
            rank=dist.get_rank(),
            start_seconds=self.start_seconds,
            clock="measured",
            instruction_context=self._watch.instruction,
            hosts=self._environment,
            filling=selection.filling if selection else None,
        )

    def _recorder(self, request: RunRequest, notes: tuple[str, ...]) -> Recorder:
        """Return the recorder; its notes are those on checkpoints and data, and the job's changes on resume."""
        run_file, is_writer = request.run_file(self.data), dist.get_rank() == 0
        return Recorder(
            request.plan,
            request.out,
            request.steps,
            is_writer=is_writer,
            run_file=run_file,
            ends=self.data.ends,
            kernels=self._kernels.description,
            notes=(
                *notes,
                *self.data.notes,
                *(startup_notes(request.job.rewards) if is_writer else ()),
                *(_changes(request.out, run_file) if request.resume and is_writer else ()),
            ),
        )

    def run_period(self, period: int) -> StepExperience:
        """Execute one period; return what this rank holds of the experience that it trained on.

        It returns once the checkpoint that was started before it is on disk, so that a failure never loses more steps
        than lie between two checkpoints.
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
            outcomes = self._reports.take(behind=self._program.most_ahead)
        if outcomes:
            self._record(outcomes)
        self._reach_consensus(period)
        if self._environment:
            self._environment.drop_step(period)
        batch = self._batches.pop(period, None) or StepExperience(step=period, rows=range(0))
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
        self._waited = time.monotonic() - start if self._program.most_ahead == 0 else 0.0

    def after_period(self, done: int) -> bool:
        """Evaluate, checkpoint and export where due after `done` updates; return True if all ranks stop here.

        An evaluated policy is always checkpointed, so that the best one can be kept.
        """
        request, has_trained = self._request, done > self.steps.start
        is_last = done == request.steps
        evaluates = has_trained and not is_last and _is_due(done, request.job.evaluation.every_steps)
        if evaluates:
            self.evaluate(done)
        by_steps = evaluates or _is_due(done, request.checkpoint_every)
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
            dist.barrier(group=self._control)
        self._watch.close()
        if self._tools:
            self._tools.close()  # otherwise the process would wait for every queued call
        self.recorder.stop()
        return Stopped(done=max(done, self.steps.start), saved=self._saved, continues=continues)

    def save(self, done: int) -> None:
        """Checkpoint the trainers and the in-flight state after `done` updates; first complete the record up to it."""
        self._record_all()
        if self._environment:
            with self._watch.collective("the rewards of steps ahead", done):
                for batch in self._batches.values():
                    self._environment.put_scores(batch)
        experience = {step: batch.experience.fields() for step, batch in self._batches.items()}
        in_flight = InFlightState(
            digests=sampling_digests(self._request.plan, self._request.job),
            num_steps=self.steps.stop,
            experience=experience,
            generation=self._actions.snapshot(),
            reassigned={step: samples for step, samples in self.data.reassigned.items() if step >= done},
        )
        with self._watch.collective("the checkpoint", done), self._host_memory.trainers_reloaded():
            save_step(self._saver, self._request.out, done, self.copies, in_flight, keep=self._request.keep)
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
        dist.barrier(group=self._control)
        copies = ((role, self.copies[stage]) for role, stage in plan.graph.train_stage.items())
        trained = (
            TrainedModel(role=role, spec=plan.facts.models.spec(role), mesh=copy.mesh, model=copy.model)
            for role, copy in copies
        )
        with self._watch.collective("the export", done), self._host_memory.trainers_reloaded():
            write_models(trained, self._request.job, self._request.directory, target)
        self._ended = time.perf_counter()

    def _restore(self, in_flight: InFlightState) -> None:
        for step, fields in in_flight.experience.items():
            for field, rows in fields.items():
                for row, values in rows.items():
                    self._batch_of(step).experience.put(field, row, values)
        self._actions.restore(in_flight.generation, in_flight.num_steps)

    def finish(self) -> None:
        """End the run on all ranks after its last step."""
        self.wait_for_checkpoint(self.steps.stop)
        with self._watch.collective("the end of the run", self.steps.stop):
            self._record_all()
            self._consensus.flush()
            self._reports.flush()
            self._executor.flush()
            dist.barrier(group=self._control)

    def close(self) -> RunSummary | None:
        """Close process groups, rewards and tools; return the summary of the run on rank 0, None elsewhere."""
        self._watch.close()
        if self._next_plan:
            self._next_plan.close()
        if self._environment:
            self._environment.close()
        if self._tools:
            self._tools.close()
        for group in self._host_groups:
            dist.destroy_process_group(group)
        return self.recorder.close()

    def _record_all(self) -> None:
        """Record the periods that rank 0 has not waited for."""
        while outcomes := self._reports.take():
            self._record(outcomes)

    def _record(self, outcomes: Sequence[PeriodResult]) -> None:
        line = self.recorder.record_period(outcomes)
        if line and self._controllers.decides:
            self._controllers.send_observation(observation(line))

    def _batch_of(self, step: int) -> StepExperience:
        if step not in self._batches:
            self._batches[step] = StepExperience(step=step, rows=range(self.data.batch_size))
        return self._batches[step]

    def is_evaluated(self, step: int) -> bool:
        """True if the policy after `step` updates was evaluated, in this run or before it was resumed."""
        return _broadcast(lambda: any(one.step == step for one in evaluations(self._request.out)))

    def evaluate(self, step: int) -> None:
        """Score responses to the held-out prompts under the present policy, always with the same random numbers."""
        if not self.data.held_out:
            return
        start = steady_now() - self.start_seconds
        batch = StepExperience(step=step, rows=range(len(self.data.held_out)), held_out=True)
        batches_ahead, self._batches = self._batches, {step: batch}
        with self._watch.evaluation(len(batch.rows)):
            self._evaluator.execute(self._evaluation, step, range(step, step + 1))
            self._evaluator.flush()
            if self._environment:
                self._environment.put_scores(batch)
                require_scores(batch.experience)
        self._batches = batches_ahead
        with self._watch.collective("the evaluation", step):
            gathered = self._gather(HeldOutPart.of(batch, self._request.job))
        if not gathered:
            return
        end = steady_now() - self.start_seconds
        span = Span(
            step=step,
            instruction="evaluate",
            kind="evaluate",
            rank=0,
            start_seconds=start,
            end_seconds=end,
            clock="measured",
        )
        evaluation = evaluation_of(gathered, step, self._request.job)
        self.recorder.record_evaluation(replace(evaluation, prompts=self.data.held_out_digest), span)
        self._ended, self._waited = time.perf_counter(), 0.0

    def _gather(self, mine: T) -> list[T]:
        """Return the objects of all ranks on rank 0, an empty list elsewhere."""
        gathered: list[T | None] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, gathered, group=self._control)
        return [item for item in gathered or [] if item is not None]


def _changes(out: Path, run_file: RunFile) -> tuple[str, ...]:
    """Return one line for each field of the job that a resumed run changes."""
    changed = changes(read_run_file(out), run_file)
    return tuple(f"changed: {one.key} from {one.one} to {one.other}" for one in changed)


def _evaluation_stages(plan: Plan) -> list[str]:
    """Return the stages that an evaluation runs."""
    return [plan.graph.writer[field] for field in EVALUATED_FIELDS if field in plan.graph.writer]


def _kernels(plan: Plan) -> ChosenKernels:
    """Return the kernels that all ranks compute with."""
    specs = map(plan.facts.models.spec, plan.graph.roles)
    return agree_on_kernels(choose_kernels(device_capabilities(host.device().type), plan.facts.precision, specs))


def _is_due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def _gloo_group() -> dist.ProcessGroup:
    """Return a gloo group of all ranks, for messages between hosts."""
    group = dist.new_group(backend="gloo", timeout=collective_timeout())
    assert group is not None
    return group


def _broadcast(compute: Callable[[], T]) -> T:
    """Return rank 0's result on every rank; only rank 0 computes it."""
    values: list[T] = [compute()] if dist.get_rank() == 0 else [cast(T, None)]
    dist.broadcast_object_list(values)
    return values[0]
