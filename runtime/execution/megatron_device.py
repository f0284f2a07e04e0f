"""The device of a rank in a run, which executes stages and refits with Megatron-core.

A stage takes the rows of its rank, runs the stage function, and puts the outputs back into the experience.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.planner.job.algorithm_settings import Distill
from meshwright.planner.job.custom_graph import OwnGraph
from meshwright.planner.job.graph_losses import old_logprobs_field, stage_loss
from meshwright.planner.job.job import Job
from meshwright.planner.plan.layout_and_schedule_rules import in_flight
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.packing import assigned_rows, micro_batches
from meshwright.profiles.stages import GENERATE, KEPT_TOKENS, Role, Stage, field_type
from meshwright.profiles.trace import FREED_BYTES
from meshwright.runtime.device import host
from meshwright.runtime.device.used_memory import peak_bytes, reset_peak
from meshwright.runtime.environment.environment import Environment, require_scores, reward_metrics
from meshwright.runtime.environment.worker_pool import ToolWorkers
from meshwright.runtime.inference.chunk_streaming import ChunkedStage, ChunkScorer
from meshwright.runtime.inference.engine_process import EngineProcess
from meshwright.runtime.inference.in_flight import GenerationState
from meshwright.runtime.inference.slots import ResumedSample
from meshwright.runtime.messages.experience import StepExperience
from meshwright.runtime.messages.sampling_masks import padded_sets
from meshwright.runtime.messages.streaming import Streaming
from meshwright.runtime.model.adapters import without_adapter
from meshwright.runtime.records.results import InstructionResult
from meshwright.runtime.records.version_gap import Gap
from meshwright.runtime.rollout.controllers import RunControllers
from meshwright.runtime.rollout.prompts import PromptData
from meshwright.runtime.rollout.stage import GenerationStage
from meshwright.runtime.rollout.verdicts import JudgeStage
from meshwright.runtime.training.bad_steps import (
    BadSteps,
    SkippedBatch,
    finite_metrics,
    non_finite_fields,
    non_finite_metric,
)
from meshwright.runtime.training.distillation import predicts_response, score_by_teachers
from meshwright.runtime.training.losses import final_metrics, within_target_kl
from meshwright.runtime.training.offload import OffloadedStages
from meshwright.runtime.training.refit import RefitCopy
from meshwright.runtime.training.trainer import (
    CHOSEN,
    MicroBatch,
    forward_distributions,
    forward_logprobs,
    forward_scalars,
)
from meshwright.runtime.training.training_batch import TrainingBatch, minibatches, training_loss
from meshwright.runtime.training.versions import cache_gap, generator_gap, scores_by_age, staleness
from meshwright.runtime.training.weight_copies import WeightCopy


class StageRunner:
    """The functions of a plan's stages on this rank, with the models and the state that they need."""

    def __init__(
        self,
        plan: Plan,
        job: Job,
        data: PromptData,
        copies: Mapping[str, WeightCopy],
        *,
        steps: range,
        streaming: Streaming,
        host_memory: OffloadedStages,
        control: RunControllers,
        out: Path,
        environment: Environment | None = None,
        evaluation_environments: Mapping[str, Environment] | None = None,
        tools: ToolWorkers | None = None,
        engine: EngineProcess | None = None,
    ) -> None:
        """`steps` are those of the run and `out` is its directory.

        Held-out batches may run in addition; they never stream.
        `environment`, and `evaluation_environments` by the name of each held-out set that has rewards of its own, are
        set on ranks that own the responses they generate, `tools` on the rank of a replica that calls them, `engine` on
        a rank that generates with an engine in another process.
        """
        self._host_memory, self._control = host_memory, control
        self._plan, self._job, self._data, self._steps = plan, job, data, steps
        self._copies = {p.stage: copies[plan.copy_of(p.stage)] for p in plan.placements}
        generation = self._copies[GENERATE]
        self._generating = (
            GenerationStage(
                plan,
                job,
                data,
                generation,
                steps=steps,
                streaming=streaming,
                environment=environment,
                evaluation_environments=evaluation_environments,
                tools=tools,
                engine=engine,
            )
            if generation.model
            else None
        )
        self._period, self._restored_steps = steps.start, range(0)
        self._bad_steps = {
            stage: BadSteps(
                out, limit=job.settings.max_bad_steps, is_writer=dist.get_rank() == self._copies[stage].mesh.ranks[0]
            )
            for stage in plan.facts.graph.train_stage.values()
        }
        judge = job.algorithm.judge if isinstance(job.algorithm, OwnGraph) else None
        self._judging = {
            placement.stage: JudgeStage(
                judge,
                data,
                self._copies[placement.stage],
                judge.judged(plan.facts.workload.wave),
                rows=placement.schedule.micro_batch_size,
            )
            for placement in plan.placements
            if judge and plan.stage(placement.stage).judges
        }
        self._chunked = {
            stage: ChunkedStage(reader, functools.partial(self._build_scorer, stage))
            for stage, reader in streaming.readers.items()
        }

    def snapshot(self) -> GenerationState | None:
        """Return the in-flight state of generation between two periods; None on a rank that does not generate."""
        return self._generating.snapshot() if self._generating else None

    def restore(self, state: GenerationState | None, num_steps: int) -> None:
        """Restore the in-flight state.

        For steps before `num_steps`, the batches already hold the outputs of stages that ran ahead; these do not run
        again.
        """
        self._restored_steps = range(num_steps)
        if state is not None:
            assert self._generating is not None
            self._generating.restore(state)

    def migrate(self, partial_responses: Mapping[int, ResumedSample]) -> None:
        """Give generation the partial responses that were sampled under another plan, by sample number."""
        if self._generating:
            self._generating.add_resumed(partial_responses)

    def begin(self, period: int) -> None:
        """Begin a period; the controllers set its overcommit and its chunk size."""
        self._period = period
        if self._generating:
            self._generating.begin_period(self._control.setting(period))

    def run(self, stage: str, batch: StepExperience) -> InstructionResult:
        """Run a stage that this rank belongs to."""
        if self._period < self._steps.start and batch.step in self._restored_steps:
            restored = batch.experience.rows(self._plan.stage(stage).writes[0])
            return InstructionResult(facts={"num_restored_rows": float(len(restored))})
        definition, model = self._plan.stage(stage), self._copies[stage].model
        base_only = without_adapter(model) if definition.base_of and model is not None else nullcontext()
        with self._host_memory.reloaded(stage) as offload_facts, base_only:
            result = self._run(definition, batch)
        return result.with_facts(offload_facts)

    def _run(self, stage: Stage, batch: StepExperience) -> InstructionResult:
        if stage.generates:
            assert self._generating is not None
            return InstructionResult(facts=self._generating.run(batch))
        if stage.is_trained:
            self._copies[stage.name].version.require(stage.name, batch.step)
        if stage.trains:
            batch.share_scores_of_duplicates()
        if stage.trains and self._job.rewards:
            require_scores(batch.experience)
            batch.sum_rewards(self._job.reward_weights, self._job.reward_model_weight)
        if stage.trains and isinstance(self._job.settings, Distill) and not self._job.learns_from_rewards:
            score_by_teachers(batch, self._job.settings, old_logprobs_field(self._job))
        if stage.trains:
            return InstructionResult(metrics=self._train(stage, batch))
        if stage.name in self._chunked and not batch.held_out:
            return InstructionResult(facts=self._score_chunks(stage, batch))
        if stage.judges:
            return InstructionResult(facts=self._judge(stage, batch))
        return InstructionResult(facts=self._forward(stage, batch))

    def _build_scorer(self, stage: str) -> ChunkScorer:
        copy, placement = self._copies[stage], self._plan.placement(stage)
        generation, workload = self._plan.placement(GENERATE).schedule, self._plan.facts.workload
        # With overcommit one replica may hold all sequences beyond a batch, so each has room for those of all replicas.
        dp = 1 if generation.overcommit else placement.layout.dp
        return ChunkScorer(
            copy.decoder,
            copy.mesh,
            max_rows=in_flight(generation, -(-workload.batch_size // dp), dp),
            max_tokens=workload.max_tokens,
            micro_batch_size=placement.schedule.micro_batch_size,
            temperature=self._job.settings.temperature,
        )

    def _forward(self, stage: Stage, batch: StepExperience) -> dict[str, float]:
        """Compute log-probabilities, values or scores of this replica's rows; only the last pipeline stage has them."""
        copy, lengths = self._copies[stage.name], batch.lengths()
        replica_rows = self._rows_of_replica(stage, batch.rows, lengths)
        groups = micro_batches(replica_rows, lengths, self._plan.placement(stage.name).schedule)
        if stage.top_tokens and not batch.held_out:
            self._put_distributions(batch, stage, groups)
            return {"num_tokens": float(sum(lengths[row] for row in replica_rows))}
        has_mask = KEPT_TOKENS in stage.reads
        packed = [
            MicroBatch.pack(
                (batch.experience.get("tokens", row) for row in group),
                kept=[padded_sets(batch.experience, row) for row in group] if has_mask else (),
            )
            for group in groups
        ]
        if copy.spec.scalar_head:
            outputs = forward_scalars(copy.decoder, copy.mesh, packed)
        else:
            outputs = forward_logprobs(copy.decoder, copy.mesh, packed, temperature=self._job.settings.temperature)
        for group, micro_batch, output in zip(groups, packed, outputs, strict=copy.mesh.is_last_stage):
            for row, values in zip(group, micro_batch.split_rows(output.cpu()), strict=True):
                self._put_outputs(batch, stage, row, values)
        return {"num_tokens": float(sum(lengths[row] for row in replica_rows))}

    def _put_distributions(self, batch: StepExperience, stage: Stage, groups: Sequence[Sequence[int]]) -> None:
        """Compute and put a teacher's log-probabilities of groups of rows, and its likeliest tokens at the positions
        that predict tokens of their responses."""
        copy, packed = self._copies[stage.name], []
        for group in groups:
            tokens = [batch.experience.get("tokens", row) for row in group]
            chosen = [predicts_response(batch, row) for row in group]
            packed.append(MicroBatch.pack(tokens, {CHOSEN: chosen}))
        outputs = forward_distributions(
            copy.decoder,
            copy.mesh,
            packed,
            top_k=min(stage.top_tokens, copy.spec.vocab_size),
            temperature=self._job.settings.temperature,
        )
        logprobs_field, tokens_field, top_logprobs_field = stage.writes
        for group, micro_batch, output in zip(groups, packed, outputs, strict=copy.mesh.is_last_stage):
            sizes = [int(predicts_response(batch, row).sum()) for row in group]
            per_row = zip(
                group,
                micro_batch.split_rows(output.logprobs.cpu()),
                output.tokens.split(sizes),
                output.top_logprobs.split(sizes),
                strict=True,
            )
            for row, logprobs, tokens, top_logprobs in per_row:
                batch.experience.put(logprobs_field, row, logprobs.clone())
                batch.experience.put(tokens_field, row, tokens.flatten())
                batch.experience.put(top_logprobs_field, row, top_logprobs.flatten())

    def _judge(self, stage: Stage, batch: StepExperience) -> dict[str, float]:
        """Generate a verdict on each of this replica's rows, and put the scores that are read off them."""
        lengths = batch.lengths()
        rows = self._rows_of_replica(stage, batch.rows, lengths)
        scores, facts = self._judging[stage.name].scores({row: batch.experience.get("tokens", row) for row in rows})
        for row, score in scores.items():
            batch.experience.put(stage.writes[0], row, torch.tensor([score]))
        return {"num_tokens": float(sum(lengths[row] for row in rows)), **facts}

    def _score_chunks(self, stage: Stage, batch: StepExperience) -> dict[str, float]:
        """Compute the outputs of `_forward` from responses that are streamed while they are generated."""
        scored = self._chunked[stage.name].run()
        for row, values in scored.values.items():
            if values is not None:
                self._put_outputs(batch, stage, row, values.cpu())
        return {"num_tokens": float(scored.num_tokens), "starved_seconds": scored.starved_seconds}

    def _train(self, stage: Stage, batch: StepExperience) -> dict[str, float]:
        """Update on each minibatch of each epoch, until approx_kl exceeds its target.

        In the critic's warm-up no other role is updated.

        Updates with numbers that are not finite are skipped; metrics are means over the others.
        """
        copy, workload, settings = self._copies[stage.name], self._plan.facts.workload, self._job.settings
        assert copy.trainer is not None
        learns, is_actor = stage_loss(self._job, stage), stage.role is Role.ACTOR
        version_metrics = _version_metrics(batch, self._plan) if is_actor else {}
        importance_sampling = not copy.spec.scalar_head and (not is_actor or _is_off_policy(self._plan))
        importance_sampling &= learns.source != "generator"  # its ratio is the importance weight
        training_batch = TrainingBatch(
            settings, batch, reads=stage.reads, workload=workload, importance_sampling=importance_sampling, loss=learns
        )
        updates, lengths, reasons = [], batch.lengths(), non_finite_fields(batch)
        learning_rate = settings.learning_rate(stage.role, batch.step)
        copy.trainer.set_learning_rate(learning_rate)
        condition, num_done = functools.partial(within_target_kl, settings=settings), 0
        is_updated = settings.updates(stage.role, batch.step)
        num_updates = workload.num_epochs * workload.num_minibatches if is_updated else 0
        num_bad = num_updates if reasons else 0
        row_groups = minibatches(
            batch.rows,
            step=batch.step,
            num_epochs=workload.num_epochs,
            num_minibatches=workload.num_minibatches,
            seed=self._data.seed,
        )
        with copy.trainer.successive_updates():
            for number, rows in enumerate(row_groups if is_updated and not reasons else ()):
                replica_rows = self._rows_of_replica(stage, rows, lengths)
                groups = micro_batches(replica_rows, lengths, self._plan.placement(stage.name).schedule)
                num_tokens = training_batch.num_tokens(rows)
                divisor = training_batch.divisor(rows)
                loss = training_loss(
                    copy.spec, copy.mesh, settings, num_tokens, divisor, own=learns.function, source=learns.source
                )
                packed = [training_batch.micro_batch(group) for group in groups]
                gap, sums = Gap.split(copy.trainer.train_step(packed, loss, condition=condition))
                if number == 0:  # only the first update starts from the weights that the generator had
                    version_metrics |= gap.metrics("generator_gap") | gap.mismatch()
                if reason := non_finite_metric(sums, number):
                    reasons.append(reason)
                    num_bad += 1
                    continue
                updates.append(final_metrics(sums))
                if not condition(sums):
                    break
                num_done += 1
        copy.version.increment()
        self._bad_steps[stage.name].record(
            SkippedBatch(
                stage=stage.name,
                batch=batch,
                reasons=tuple(reasons),
                settings=settings,
                num_epochs=workload.num_epochs,
                num_minibatches=workload.num_minibatches,
                importance_sampling=importance_sampling,
            )
        )
        names = updates[0] if updates else ()
        metrics = {name: sum(update[name] for update in updates) / len(updates) for name in names}
        if not is_actor and (learns.function or not copy.spec.scalar_head):  # an actor has metrics of the same names
            metrics = {
                name if name == "grad_norm" else f"{stage.role}_{name}": value for name, value in metrics.items()
            }
        if updates:
            metrics[f"{stage.role}_grad_norm"] = metrics.pop("grad_norm")
        metrics[f"{stage.role}_learning_rate"] = learning_rate if is_updated else 0.0
        metrics[f"{stage.role}_bad_updates"] = float(num_bad)
        if not is_actor:
            return metrics
        skipped = num_updates - num_done - num_bad
        batch_metrics = (
            training_batch.metrics()
            | version_metrics
            | reward_metrics(batch, [reward.name for reward in self._job.rewards])
        )
        return finite_metrics(metrics | {"skipped_updates": float(skipped)} | batch_metrics)

    def _put_outputs(self, batch: StepExperience, stage: Stage, row: int, values: Tensor) -> None:
        """Put the outputs [S] of a row into the batch.

        A score is the output at the last token. The last of the log-probabilities, which predicts no token, becomes 0.
        """
        field, last = stage.writes[0], len(values) - 1
        if field_type(field).per_sequence:
            values = values[last:]
        elif not self._copies[stage.name].spec.scalar_head:
            values = F.pad(values[:last], (0, 1))
        batch.experience.put(field, row, values.clone())

    def _rows_of_replica(self, stage: Stage, rows: Sequence[int], lengths: Mapping[int, int]) -> tuple[int, ...]:
        """Return the rows of this rank's replica."""
        replica = self._copies[stage.name].mesh.dp_rank
        return assigned_rows(rows, lengths, replica, self._plan.row_split_of(stage.name))


def _is_off_policy(plan: Plan) -> bool:
    """Return True if tokens may be sampled by another policy than the one that an update starts from."""
    return plan.staleness > 0 or plan.facts.generation_weights is not None


def _version_metrics(batch: StepExperience, plan: Plan) -> dict[str, float]:
    """Return metrics of the weight versions that sampled a batch.

    The step of the batch is the weight version that is trained on it. The gap between generator and trainer is measured
    here if the actor's log-probabilities were recomputed, and otherwise by the first update.

    Raises RunFailed if the staleness of a token exceeds the plan's bound.
    """
    token_staleness = staleness(batch, batch.step, plan.staleness).double()
    has_overcommit = plan.placement(GENERATE).schedule.overcommit > 0
    gaps = {}
    if plan.facts.old_logprobs == "recompute":
        gap = generator_gap(batch, batch.rows, batch.step)
        gaps = gap.metrics("generator_gap") | gap.mismatch()
        gaps |= cache_gap(batch, batch.rows, batch.step).metrics("cache_gap")
    return {
        "staleness": float(token_staleness.mean()),
        "max_staleness": float(token_staleness.max()),
        **gaps,
        **(scores_by_age(batch, batch.step, plan.staleness) if has_overcommit else {}),
    }


class MegatronDevice:
    """The device of one rank.

    Weights that another pool receives are sent as soon as they are trained, if a later period uses them. The sends are
    asynchronous: this rank continues with whatever does not train these weights.

    Peak memory is measured in every period on CUDA. On a CPU it is measured in one period, since its allocator has to
    return cached memory before each measurement: in the second one if there are two, because Python's objects and the
    caches of libraries, for which a plan has no term, grow in the first. What the process then holds beside the tensors
    of its models is left out.
    """

    def __init__(
        self,
        actions: StageRunner,
        refits: Mapping[tuple[str, str], RefitCopy],
        *,
        bytes_before: int,
        tensor_bytes: int,
        steps: range,
        engine: EngineProcess | None = None,
    ) -> None:
        """`refits` are keyed by source and target stage. The memory of the process of `engine` is added to the rank's.

        On a GPU `bytes_before` were in use before the models were built. On a CPU `tensor_bytes` are those of the
        models, with gradients and moments.
        """
        self._stages, self._refits = actions, refits
        self._bytes_before, self._tensor_bytes, self._engine = bytes_before, tensor_bytes, engine
        self._steps, self._period, self._measures = steps, steps.start, False

    def begin(self, period: int) -> None:
        """Begin a period."""
        self._period = period
        self._measures = host.on_cuda() or period == min(self._steps.start + 1, self._steps.stop - 1)
        if self._measures and not host.on_cuda():
            self._bytes_before = reset_peak() - self._tensor_bytes
        self._stages.begin(period)

    def run_stage(self, stage: str, batch: StepExperience) -> InstructionResult:
        """Run a stage; before it, wait for earlier sends of its weights, and after it, start those of the new ones."""
        outgoing = [refit for (source, _), refit in self._refits.items() if source == stage]
        for refit in outgoing:
            refit.wait()
        with self._peak() as facts:
            result = self._stages.run(stage, batch)
        if facts:  # an engine beside the rank has freed its cache before the measurement
            facts["memory_bytes"] += result.facts.get(FREED_BYTES, 0.0)
        if self._period + 1 in self._steps:
            for refit in outgoing:
                refit.start_send()
        return result.with_facts(facts)

    def refit(self, source: str, target: str) -> InstructionResult:
        """Take this rank's part in copying the weights of `source` into `target`."""
        with self._peak() as facts:
            self._refits[source, target].run()
        return InstructionResult(facts=facts)

    @contextmanager
    def _peak(self) -> Iterator[dict[str, float]]:
        """Yield the facts of an instruction, which get its peak memory on exit."""
        facts: dict[str, float] = {}
        if not self._measures:
            yield facts
            return
        reset_peak()
        yield facts
        engine_bytes = self._engine.resident_bytes if self._engine else 0
        facts["memory_bytes"] = float(peak_bytes() - self._bytes_before + engine_bytes)

    def synchronise(self) -> None:
        """Wait until all work submitted to the device is done."""
        host.synchronise()
