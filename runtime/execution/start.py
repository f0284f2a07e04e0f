"""The start of one rank of a run, in four steps; each takes what the steps before it have returned.

| step | what it does | result |
|---|---|---|
| `read` | reads the prompts, and lowers the plan to programs | `Inputs` |
| `build` | builds this rank's copies of the models | `Models` |
| `restore` | loads the newest checkpoint into them | `Progress` |
| `connect` | opens process groups, and makes the objects that run stages and exchange messages | `Connections` |

All ranks take the same steps in the same order, because `build`, `restore` and `connect` are collective over the world.
Nothing is sampled before the first period.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist

from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.durations import failing_call_seconds
from meshwright.planner.program.program import Program, lower, output_owners, split_waves
from meshwright.profiles.stages import GENERATE, Role
from meshwright.runtime.device import host
from meshwright.runtime.device.capabilities import device_capabilities
from meshwright.runtime.device.process_groups import collective_timeout
from meshwright.runtime.device.used_memory import bytes_in_use, tensor_bytes
from meshwright.runtime.environment.environment import Environment, build_environment, startup_notes
from meshwright.runtime.environment.worker_pool import ToolWorkers
from meshwright.runtime.execution.consensus import Consensus
from meshwright.runtime.execution.executor import Executor, steady_now
from meshwright.runtime.execution.held_out import evaluated_fields
from meshwright.runtime.execution.megatron_device import MegatronDevice, StageRunner
from meshwright.runtime.execution.replanning import NextPlan
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.resume import LoadedState, ResumePolicy, changes, load_step
from meshwright.runtime.execution.sample_selection import GroupSampling, SampleFilter
from meshwright.runtime.execution.watchdog import RunWatch
from meshwright.runtime.inference.engine_process import EngineFacts, EngineProcess
from meshwright.runtime.inference.in_flight import InFlightState
from meshwright.runtime.inference.slots import ResumedSample
from meshwright.runtime.messages.experience import ExperienceTransport, StepExperience
from meshwright.runtime.messages.streaming import Streaming
from meshwright.runtime.messages.transport import Reports, Transport
from meshwright.runtime.model.kernel_choice import ChosenKernels, agree_on_kernels, choose_kernels
from meshwright.runtime.records.kept_responses import drop_samples
from meshwright.runtime.records.record import Recorder
from meshwright.runtime.records.run_directory import RunFile, read_run_file
from meshwright.runtime.records.run_lines import elapsed_seconds, observations
from meshwright.runtime.rollout.controllers import RunControllers
from meshwright.runtime.rollout.external_engine import VERSIONS, send_base_weights, start_engine
from meshwright.runtime.rollout.prompts import PromptData, read_data
from meshwright.runtime.training.checkpoint import Saver
from meshwright.runtime.training.offload import OffloadedStages
from meshwright.runtime.training.weight_copies import WeightCopy, build_copies, build_refits, restore_versions

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The prompts of a run, and its programs."""

    data: PromptData
    program: Program
    """The program of a period."""
    evaluations: Mapping[str, Program]
    """The programs that score responses to each set of held-out prompts, by its name."""
    bytes_before: int
    """Memory in use on this rank's device before any model was built."""


def read(request: RunRequest) -> Inputs:
    """Read the prompts, and lower the plan to the programs of a period and of the evaluations."""
    plan, data = request.plan, read_data(request.job, request.directory)

    def evaluation(name: str) -> Program:
        fields = evaluated_fields(request.job, name)
        return lower(plan, [plan.graph.writer[field] for field in fields if field in plan.graph.writer]).synchronous()

    return Inputs(
        data=data,
        program=split_waves(lower(plan), plan),
        evaluations={name: evaluation(name) for name in data.held_out},
        bytes_before=bytes_in_use(),
    )


@dataclass(frozen=True, kw_only=True)
class Models:
    """The copies of models of one rank by name (`Plan.copy_of`), and the kernels that all ranks compute with."""

    kernels: ChosenKernels
    copies: Mapping[str, WeightCopy]
    tensor_bytes: int
    """On a CPU, the bytes of the weights, gradients and moments of the copies on this rank; 0 on a GPU, which counts
    its own."""
    engine: EngineProcess | None
    """The engine beside this rank, which may still be starting; None on a rank that generates with our own, or not."""


def build(request: RunRequest, inputs: Inputs) -> Models:
    """Start the engine of this rank if it has one, and build this rank's copies of the models, with their meshes and
    trainers, and load the weights of the job."""
    plan, job = request.plan, request.job
    engine = start_engine(plan, job, request.directory, request.out, inputs.data.num_tokens)
    specs = map(plan.facts.models.spec, plan.graph.roles)
    kernels = agree_on_kernels(choose_kernels(device_capabilities(host.device().type), plan.facts.precision, specs))
    copies = build_copies(plan, job, request.directory, inputs.data.num_tokens, kernels)
    return Models(kernels=kernels, copies=copies, tensor_bytes=0 if host.on_cuda() else tensor_bytes(), engine=engine)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The point from which a run continues: step 0, or that of the checkpoint that was loaded.

    A run that is resumed with the same plan has the state of stages that ran ahead and of sequences in flight
    (`in_flight`); with another plan it has only the sampled tokens (`partial_responses`).
    """

    data: PromptData
    """The prompts, with those of the checkpoint's partial batches assigned to the same steps as before."""
    steps: range
    periods: range
    in_flight: InFlightState | None
    partial_responses: Mapping[int, ResumedSample]
    start_seconds: float
    """The value of `steady_now()` at which the run would have started if it had never been interrupted."""
    keeps_samples: bool
    """True on the rank that writes sample responses; it holds every field that it trains on."""
    notes: tuple[str, ...]
    """Notes on damaged checkpoints and on the in-flight state."""


def restore(request: RunRequest, inputs: Inputs, models: Models) -> Progress:
    """Load the newest checkpoint into the trainers if the run is resumed; what was recorded after it is dropped."""
    policy = ResumePolicy(plan=request.plan, job=request.job, resample=request.resample)
    loaded = load_step(request.out, models.copies, policy) if request.resume else LoadedState()
    restore_versions(models.copies, loaded.step)
    steps, migrated = range(loaded.step, request.steps), loaded.migrated
    actor = models.copies[request.plan.graph.train_stage[Role.ACTOR]]
    keeps_samples = inputs.data.tokenizer is not None and dist.get_rank() == actor.mesh.ranks[0]
    if keeps_samples:
        drop_samples(request.out, loaded.step)
    return Progress(
        data=replace(inputs.data, reassigned=migrated.reassigned, num_wave_prompts=migrated.num_wave_prompts),
        steps=steps,
        periods=inputs.program.periods(steps),
        in_flight=loaded.in_flight,
        partial_responses=migrated.samples,
        start_seconds=broadcast(lambda: steady_now() - (elapsed_seconds(request.out) if request.resume else 0.0)),
        keeps_samples=keeps_samples,
        notes=loaded.notes,
    )


class OpenBatches:
    """The batches that are being filled, by step: those of stages that run ahead, and that of the current step."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self.by_step: dict[int, StepExperience] = {}

    def batch_of(self, step: int) -> StepExperience:
        """Return the batch of a step, an empty one the first time."""
        if step not in self.by_step:
            self.by_step[step] = StepExperience(step=step, rows=range(self._batch_size))
        return self.by_step[step]

    def restore(self, state: InFlightState) -> None:
        """Fill the batches with the experience of a checkpoint."""
        for step, fields in state.experience.items():
            for field, rows in fields.items():
                for row, values in rows.items():
                    self.batch_of(step).experience.put(field, row, values)
        for step, metrics in state.selection.items():
            self.batch_of(step).selection.update(metrics)

    @contextmanager
    def only(self, batch: StepExperience) -> Iterator[None]:
        """Context in which `batch` is the only batch, for an evaluation between two periods."""
        others, self.by_step = self.by_step, {batch.step: batch}
        yield
        self.by_step = others


@dataclass(frozen=True, kw_only=True)
class Connections:
    """The objects of one rank that run stages and exchange messages with other ranks."""

    groups: tuple[dist.ProcessGroup, ...]
    """Groups of all ranks for messages between hosts: one for each use, so that messages of one are not taken for those
    of another."""
    control: dist.ProcessGroup
    saver: Saver
    reports: Reports
    controllers: RunControllers
    consensus: Consensus
    host_memory: OffloadedStages
    environment: Environment | None
    """The processes that compute rewards, on ranks that own generated responses."""
    evaluation_environments: Mapping[str, Environment]
    """The processes that score held-out sets with rewards of their own, by the name of the set, on the same ranks."""
    tools: ToolWorkers | None
    """The processes that run the tool, on the first rank of each generating replica with multi-turn rollouts."""
    batches: OpenBatches
    stages: StageRunner
    watch: RunWatch
    executor: Executor
    evaluator: Executor
    """The executor of evaluations."""
    next_plan: NextPlan | None
    engine_facts: EngineFacts | None
    """What generates instead of our own engine; the same on every rank."""


def connect(request: RunRequest, inputs: Inputs, models: Models, progress: Progress) -> Connections:
    """Open the process groups, and make what runs stages and exchanges messages; return once all ranks have."""
    plan, job, data, steps = request.plan, request.job, progress.data, progress.steps
    groups = tuple(_gloo_group() for _ in range(5))
    control, saver = groups[0], Saver(groups[1])
    reporting, transport, evaluating = map(Transport, groups[2:])

    observed = broadcast(lambda: observations(request.out, steps.start))
    controllers = RunControllers(plan, reporting, progress.periods, observed)
    host_memory = OffloadedStages(plan, models.copies)
    environment, tools = _environment(request), _tools(request, models)
    evaluation_environments = _evaluation_environments(request)
    batches = OpenBatches(data.batch_size)
    stages = StageRunner(
        plan,
        job,
        data,
        models.copies,
        steps=steps,
        streaming=Streaming(plan, transport),
        host_memory=host_memory,
        control=controllers,
        out=request.out,
        environment=environment,
        evaluation_environments=evaluation_environments,
        tools=tools,
        engine=models.engine,
    )
    stages.migrate(progress.partial_responses)
    if progress.in_flight is not None:
        batches.restore(progress.in_flight)
        stages.restore(progress.in_flight.generation, progress.in_flight.num_steps)

    refits = build_refits(plan, models.copies)
    device = MegatronDevice(
        stages,
        refits,
        bytes_before=inputs.bytes_before,
        tensor_bytes=models.tensor_bytes,
        steps=steps,
        engine=models.engine,
    )
    failing_seconds = failing_call_seconds(plan, job.all_rewards, job.tool)
    watch = RunWatch(plan, request.out, progress.start_seconds, timeout_seconds=failing_seconds)

    def executor_with(messages: Transport) -> Executor:
        selection = GroupSampling.of(plan, job) or SampleFilter.of(plan, job)
        return Executor(
            device,
            ExperienceTransport(messages),
            batches.batch_of,
            rank=dist.get_rank(),
            start_seconds=progress.start_seconds,
            clock="measured",
            instruction_context=watch.instruction,
            hosts=environment,
            filling=selection.filling if selection else None,
        )

    connections = Connections(
        groups=groups,
        control=control,
        saver=saver,
        reports=Reports(reporting, num_ranks=dist.get_world_size()),
        controllers=controllers,
        consensus=Consensus(control, max_steps_ahead=inputs.program.max_steps_ahead),
        host_memory=host_memory,
        environment=environment,
        evaluation_environments=evaluation_environments,
        tools=tools,
        batches=batches,
        stages=stages,
        watch=watch,
        executor=executor_with(transport),
        evaluator=executor_with(evaluating),
        next_plan=NextPlan.for_rank(request, steps.start),
        engine_facts=_engine_facts(plan, models, control),
    )
    dist.barrier(group=control)
    return connections


def _engine_facts(plan: Plan, models: Models, control: dist.ProcessGroup) -> EngineFacts | None:
    """Wait until the engines of all ranks have started, and give them the base weights, which no refit sends. They
    sleep until they generate. Return what the engines are; None without engines."""
    engine, mine = models.engine, None
    if engine:
        mine = engine.wait_until_ready(VERSIONS[plan.facts.engine])
        send_base_weights(engine, models.copies[plan.copy_of(GENERATE)])
        engine.sleep()
    by_rank: list[EngineFacts | None] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, mine, group=control)
    return next((facts for facts in by_rank if facts), None)


def _gloo_group() -> dist.ProcessGroup:
    """Return a gloo group of all ranks, for messages between hosts."""
    group = dist.new_group(backend="gloo", timeout=collective_timeout())
    assert group is not None
    return group


def _environment(request: RunRequest) -> Environment | None:
    plan, rewards = request.plan, request.job.rewards
    workers = {one.reward: one.workers for one in plan.workers}
    return build_environment(rewards, workers) if rewards and _owns_responses(plan) else None


_EVALUATION_WORKERS = 2
"""Workers on each replica for a reward of an evaluation set, where the job does not give their number."""


def _evaluation_environments(request: RunRequest) -> dict[str, Environment]:
    """Start the workers of the held-out sets that have rewards of their own; return them by the name of the set."""
    if not _owns_responses(request.plan):
        return {}
    of_sets = {name: one.rewards for name, one in request.job.evaluation.sets.items() if one.rewards}
    return {
        name: build_environment(rewards, {one.name: one.workers or _EVALUATION_WORKERS for one in rewards})
        for name, rewards in of_sets.items()
    }


def _owns_responses(plan: Plan) -> bool:
    """Return True on a rank that owns generated responses."""
    return dist.get_rank() in output_owners(plan, GENERATE)


def _tools(request: RunRequest, models: Models) -> ToolWorkers | None:
    plan, tool = request.plan, request.job.tool
    calls_tool = plan.facts.workload.turns and models.copies[plan.copy_of(GENERATE)].mesh.is_first_of_replica
    return ToolWorkers(tool) if tool and calls_tool else None


def recorder_of(request: RunRequest, models: Models, progress: Progress, engine_facts: EngineFacts | None) -> Recorder:
    """Return the recorder of a run, with the notes on its checkpoint, data and rewards and on changes of the job."""
    run_file, is_writer = request.run_file(progress.data), dist.get_rank() == 0
    return Recorder(
        request.plan,
        request.out,
        request.steps,
        is_writer=is_writer,
        run_file=run_file,
        ends=progress.data.ends,
        kernels=models.kernels.description + (f", generation by {engine_facts}" if engine_facts else ""),
        notes=(
            *progress.notes,
            *progress.data.notes,
            *(startup_notes(request.job.all_rewards) if is_writer else ()),
            *(_changes(request.out, run_file) if request.resume and is_writer else ()),
        ),
    )


def _changes(out: Path, run_file: RunFile) -> tuple[str, ...]:
    """Return one line for each field of the job that a resumed run changes."""
    changed = changes(read_run_file(out), run_file)
    return tuple(f"changed: {one.key} from {one.one} to {one.other}" for one in changed)


def broadcast(compute: Callable[[], T]) -> T:
    """Return rank 0's result on every rank; only rank 0 computes it."""
    values: list[T] = [compute()] if dist.get_rank() == 0 else [cast(T, None)]
    dist.broadcast_object_list(values)
    return values[0]
