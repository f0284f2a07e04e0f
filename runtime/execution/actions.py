"""Execution of the stages on one rank: take the rows of the rank, run the stage function, put its outputs back."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.planner.plan.distill_settings import Distill
from meshwright.planner.plan.job import Job
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.rules import in_flight
from meshwright.profiles.stages import GENERATE, Stage, field_type
from meshwright.runtime.environment.environment import Environment, require_scores, reward_metrics
from meshwright.runtime.environment.tools import ToolWorkers
from meshwright.runtime.generation.chunked_scoring import ChunkedStage
from meshwright.runtime.generation.control import RunControllers
from meshwright.runtime.generation.generation_stage import GenerationStage
from meshwright.runtime.generation.in_flight_state import GenerationState
from meshwright.runtime.generation.prompts import PromptData
from meshwright.runtime.generation.scoring import ChunkScorer
from meshwright.runtime.generation.slots import ResumedSample
from meshwright.runtime.messages.chunk_transport import Streaming
from meshwright.runtime.messages.experience import assigned_rows, micro_batches
from meshwright.runtime.messages.step_experience import StepExperience
from meshwright.runtime.model.adapted import without_adapter
from meshwright.runtime.records.outcome import InstructionResult
from meshwright.runtime.training.bad_steps import (
    BadSteps,
    SkippedBatch,
    finite_metrics,
    non_finite_fields,
    non_finite_metric,
)
from meshwright.runtime.training.bodies import MicroBatch, forward_logprobs, forward_scalars
from meshwright.runtime.training.copies import WeightCopy
from meshwright.runtime.training.distillation import score_by_teachers
from meshwright.runtime.training.learning import TrainingBatch, minibatches, training_loss
from meshwright.runtime.training.offload import OffloadedStages
from meshwright.runtime.training.ppo import final_metrics, within_target_kl
from meshwright.runtime.training.versions import cache_gap, generator_gap, scores_by_age, staleness


class StageRunner:
    """The stages of a plan on this rank."""

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
        tools: ToolWorkers | None = None,
    ) -> None:
        """`steps` are those of the run and `out` is its directory. Held-out batches may run besides; they never stream.

        `environment` is set on ranks that own the responses they generate, `tools` on the rank of a replica that calls
        them.
        """
        self._host_memory, self._control = host_memory, control
        self._plan, self._job, self._data, self._steps = plan, job, data, steps
        self._copies = {p.stage: copies[plan.copy_of(p.stage)] for p in plan.placements}
        generation = self._copies[GENERATE]
        self._generating = (
            GenerationStage(
                plan, job, data, generation, steps=steps, streaming=streaming, environment=environment, tools=tools
            )
            if generation.model
            else None
        )
        self._turn, self._done = steps.start, range(0)
        self._bad_steps = {
            stage: BadSteps(
                out, limit=job.settings.max_bad_steps, is_writer=dist.get_rank() == self._copies[stage].mesh.ranks[0]
            )
            for stage in plan.facts.graph.train_stage.values()
        }
        self._chunked = {
            stage: ChunkedStage(reader, functools.partial(self._build_scorer, stage))
            for stage, reader in streaming.readers.items()
        }

    def snapshot(self) -> GenerationState | None:
        """Return the in-flight state of generation between two periods; None on a rank that does not generate."""
        return self._generating.snapshot() if self._generating else None

    def restore(self, state: GenerationState | None, num_steps: int) -> None:
        """Restore the in-flight state. What stages ran ahead for steps before `num_steps` is in the batches already."""
        self._done = range(num_steps)
        if state is not None:
            assert self._generating is not None
            self._generating.restore(state)

    def migrate(self, partial_responses: Mapping[int, ResumedSample]) -> None:
        """Give generation the partial responses that were sampled under another plan, by sample number."""
        if self._generating:
            self._generating.add_resumed(partial_responses)

    def begin(self, period: int) -> None:
        """Begin a period; controllers set how it generates."""
        self._turn = period
        if self._generating:
            self._generating.begin_period(self._control.setting(period))

    def run(self, stage: str, batch: StepExperience) -> InstructionResult:
        """Run a stage that this rank belongs to."""
        if self._turn < self._steps.start and batch.step in self._done:
            restored = batch.experience.rows(self._plan.stage(stage).writes[0])
            return InstructionResult(facts={"num_restored_rows": float(len(restored))})
        kind, model = self._plan.stage(stage), self._copies[stage].model
        base_only = without_adapter(model) if kind.base_of and model is not None else nullcontext()
        with self._host_memory.reloaded(stage) as offload_facts, base_only:
            findings = self._run(kind, batch)
        return findings.with_facts(offload_facts)

    def _run(self, kind: Stage, batch: StepExperience) -> InstructionResult:
        if kind.generates:
            assert self._generating is not None
            return InstructionResult(facts=self._generating.run(batch))
        if kind.is_trained:
            self._copies[kind.name].version.require(kind.name, batch.step)
        if kind.trains:
            batch.share_scores_of_duplicates()
        if kind.trains and self._job.rewards:
            require_scores(batch.experience)
            batch.sum_rewards(self._job.reward_weights, self._job.reward_model_weight)
        if kind.trains and isinstance(self._job.settings, Distill):
            score_by_teachers(batch, self._job.settings)
        if kind.trains:
            return InstructionResult(metrics=self._train(kind, batch))
        if kind.name in self._chunked and not batch.held_out:
            return InstructionResult(facts=self._score_chunks(kind, batch))
        return InstructionResult(facts=self._forward(kind, batch))

    def _build_scorer(self, stage: str) -> ChunkScorer:
        copy, placement = self._copies[stage], self._plan.placement(stage)
        generation, workload = self._plan.placement(GENERATE).schedule, self._plan.facts.workload
        # With overcommit one replica may hold all sequences beyond a batch: nothing controls which stay in flight.
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
        """Compute log-probabilities, values or scores of this replica's rows, held by the last pipeline stage."""
        copy, lengths = self._copies[stage.name], batch.lengths()
        mine = self._rows_of_replica(stage, batch.rows, lengths)
        groups = micro_batches(mine, lengths, self._plan.placement(stage.name).schedule)
        blocks = [MicroBatch.pack(batch.experience.get("tokens", row) for row in group) for group in groups]
        if copy.spec.scalar_head:
            outputs = forward_scalars(copy.decoder, copy.mesh, blocks)
        else:
            outputs = forward_logprobs(copy.decoder, copy.mesh, blocks, temperature=self._job.settings.temperature)
        for group, block, output in zip(groups, blocks, outputs, strict=copy.mesh.is_last_stage):
            for row, values in zip(group, block.split_rows(output.cpu()), strict=True):
                self._put_outputs(batch, stage, row, values)
        return {"num_tokens": float(sum(lengths[row] for row in mine))}

    def _score_chunks(self, stage: Stage, batch: StepExperience) -> dict[str, float]:
        """Compute the outputs of `_forward` from responses that are streamed while they are generated."""
        scored = self._chunked[stage.name].run()
        for row, values in scored.values.items():
            if values is not None:
                self._put_outputs(batch, stage, row, values.cpu())
        return {"num_tokens": float(scored.num_tokens), "starved_seconds": scored.starved_seconds}

    def _train(self, stage: Stage, batch: StepExperience) -> dict[str, float]:
        """Update on each minibatch of each epoch, until approx_kl exceeds its target.

        Updates with numbers that are not finite are skipped; metrics are means over the others.
        """
        copy, workload, settings = self._copies[stage.name], self._plan.facts.workload, self._job.settings
        assert copy.trainer is not None
        version_metrics = _version_metrics(batch, self._plan)
        weighs_draws = _is_off_policy(self._plan) and not copy.spec.scalar_head
        learning = TrainingBatch(
            settings, batch, reads=stage.reads, workload=workload, importance_sampling=weighs_draws
        )
        updates, lengths, reasons = [], batch.lengths(), non_finite_fields(batch)
        learning_rate = settings.learning_rate(stage.role, batch.step)
        copy.trainer.set_learning_rate(learning_rate)
        condition, num_done = functools.partial(within_target_kl, settings=settings), 0
        num_updates = workload.num_epochs * workload.num_minibatches
        num_bad = num_updates if reasons else 0
        row_groups = minibatches(
            batch.rows,
            step=batch.step,
            num_epochs=workload.num_epochs,
            num_minibatches=workload.num_minibatches,
            seed=self._data.seed,
        )
        with copy.trainer.successive_updates():
            for number, rows in enumerate(row_groups if not reasons else ()):
                mine = self._rows_of_replica(stage, rows, lengths)
                groups = micro_batches(mine, lengths, self._plan.placement(stage.name).schedule)
                num_tokens = learning.num_tokens(rows)
                loss = training_loss(copy.spec, copy.mesh, settings, num_tokens, learning.divisor(rows))
                blocks = [learning.micro_batch(group) for group in groups]
                sums = copy.trainer.train_step(blocks, loss, condition=condition)
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
                importance_sampling=weighs_draws,
            )
        )
        names = updates[0] if updates else ()
        metrics = {name: sum(update[name] for update in updates) / len(updates) for name in names}
        if updates:
            metrics[f"{stage.role}_grad_norm"] = metrics.pop("grad_norm")
        metrics[f"{stage.role}_learning_rate"] = learning_rate
        metrics[f"{stage.role}_bad_updates"] = float(num_bad)
        if copy.spec.scalar_head:
            return metrics
        skipped = num_updates - num_done - num_bad
        more = (
            learning.metrics() | version_metrics | reward_metrics(batch, [reward.name for reward in self._job.rewards])
        )
        return finite_metrics(metrics | {"skipped_updates": float(skipped)} | more)

    def _put_outputs(self, batch: StepExperience, stage: Stage, row: int, values: Tensor) -> None:
        """Put the outputs [S] of a row into the batch.

        A score is the output at the last token; of log-probabilities the last is dropped, as it predicts no token.
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
    """Return metrics of the weight versions that sampled a batch; its step is the version that is trained.

    Raises RunFailed if the staleness of a token exceeds the plan's bound.
    """
    token_staleness = staleness(batch, batch.step, plan.staleness).double()
    defers = plan.placement(GENERATE).schedule.overcommit > 0
    gap = generator_gap(batch, batch.rows, batch.step)
    return {
        "staleness": float(token_staleness.mean()),
        "max_staleness": float(token_staleness.max()),
        **gap.metrics("generator_gap"),
        **gap.mismatch(),
        **cache_gap(batch, batch.rows, batch.step).metrics("cache_gap"),
        **(scores_by_age(batch, batch.step, plan.staleness) if defers else {}),
    }
