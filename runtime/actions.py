"""What each stage does on this rank: take its rows, run the stage's body, put what it wrote into the experience."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor

from meshwright.planner.job import Job
from meshwright.planner.leads import GENERATE
from meshwright.planner.plan import Plan
from meshwright.planner.program import version_of_generation
from meshwright.planner.rules import in_flight
from meshwright.profiles.stages import STAGE_BY_NAME, Stage
from meshwright.runtime.batch import Batch
from meshwright.runtime.bodies import MicroBatch, forward_logprobs, forward_scalars
from meshwright.runtime.chunked import ChunkedStage
from meshwright.runtime.control import Control
from meshwright.runtime.copies import WeightCopy
from meshwright.runtime.data import PromptData
from meshwright.runtime.experience import even_share, micro_batches
from meshwright.runtime.generating import Generating
from meshwright.runtime.learning import Learning, minibatches, training_loss
from meshwright.runtime.offload import HostMemory
from meshwright.runtime.ppo import final_metrics
from meshwright.runtime.scoring import ChunkScorer
from meshwright.runtime.streaming import Streaming
from meshwright.runtime.underway import Drawing


class Actions:
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
        host_memory: HostMemory,
        control: Control,
    ) -> None:
        """`steps` are those of the run; held-out batches, of which nothing streams, may be run beside them."""
        self._host_memory, self._control = host_memory, control
        self._plan, self._job, self._data, self._steps = plan, job, data, steps
        self._copies = {p.stage: copies[plan.copy_of(p.stage)] for p in plan.placements}
        generation = self._copies[GENERATE]
        self._generating = (
            Generating(plan, job, data, generation, steps=steps, streaming=streaming) if generation.model else None
        )
        self._version = steps.start
        self._turn, self._done = steps.start, range(0)
        self._chunked = {
            stage: ChunkedStage(reader, functools.partial(self._build_scorer, stage))
            for stage, reader in streaming.readers.items()
        }

    def drawing(self) -> Drawing | None:
        """Where generation stands between two turns; None on a rank that does not generate."""
        return self._generating.kept() if self._generating else None

    def resume(self, drawing: Drawing | None, num_steps: int) -> None:
        """Goes on from there. What stages work ahead for steps before `num_steps` is in their batches already."""
        self._done = range(num_steps)
        if drawing is not None:
            assert self._generating is not None
            self._generating.resume(drawing)

    def begin(self, turn: int) -> None:
        """A turn begins: it generates with this policy, and as controllers decide."""
        self._version = version_of_generation(self._plan, turn, self._steps.start)
        self._turn = turn
        if self._generating:
            self._generating.begin(self._control.setting(turn))

    def run(self, stage: str, batch: Batch) -> dict[str, float]:
        """Runs a stage that this rank belongs to; returns what is worth recording of it."""
        if self._turn < self._steps.start and batch.step in self._done:
            return {"num_restored_rows": float(len(batch.experience.rows(STAGE_BY_NAME[stage].writes[0])))}
        with self._host_memory.reloaded(stage) as moved:
            facts = self._run(STAGE_BY_NAME[stage], batch)
        return facts | moved

    def _run(self, kind: Stage, batch: Batch) -> dict[str, float]:
        if kind.generates:
            assert self._generating is not None
            return self._generating.run(batch, self._version)
        if kind.trains:
            return self._train(kind, batch)
        if kind.name in self._chunked and not batch.held_out:
            return self._score_chunks(kind, batch)
        return self._forward(kind, batch)

    def _build_scorer(self, stage: str) -> ChunkScorer:
        copy, placement = self._copies[stage], self._plan.placement(stage)
        generation, workload = self._plan.placement(GENERATE).schedule, self._plan.facts.workload
        # One replica may hold all that is beyond a batch: which sequences stay in flight is nobody's choice.
        dp = 1 if generation.overcommit else placement.layout.dp
        return ChunkScorer(
            copy.decoder,
            copy.mesh,
            max_rows=in_flight(generation, workload.batch_size // dp, dp),
            max_tokens=workload.max_tokens,
            micro_batch_size=placement.schedule.micro_batch_size,
            temperature=self._job.ppo.temperature,
        )

    def _forward(self, stage: Stage, batch: Batch) -> dict[str, float]:
        """Log-probabilities, values or scores of this replica's rows; ranks of the last pipeline stage hold them."""
        copy, lengths = self._copies[stage.name], batch.lengths()
        mine = self._mine(stage, batch.rows, lengths)
        groups = micro_batches(mine, lengths, self._plan.placement(stage.name).schedule.micro_batch_size)
        blocks = [MicroBatch.of(batch.experience.get("tokens", row) for row in group) for group in groups]
        if copy.spec.scalar_head:
            outputs = forward_scalars(copy.decoder, copy.mesh, blocks)
        else:
            outputs = forward_logprobs(copy.decoder, copy.mesh, blocks, temperature=self._job.ppo.temperature)
        for group, block, output in zip(groups, blocks, outputs, strict=copy.mesh.is_last_stage):
            for row, values in zip(group, block.of_rows(output.cpu()), strict=True):
                _put_answers(batch, stage, row, values)
        return {"num_tokens": float(sum(lengths[row] for row in mine))}

    def _score_chunks(self, stage: Stage, batch: Batch) -> dict[str, float]:
        """As `_forward`, of responses that are read while they are generated."""
        scored = self._chunked[stage.name].run()
        for row, values in scored.answers.items():
            if values is not None:
                _put_answers(batch, stage, row, values.cpu())
        return {"num_tokens": float(scored.num_tokens), "starved_seconds": scored.starved_seconds}

    def _train(self, stage: Stage, batch: Batch) -> dict[str, float]:
        """One update for each minibatch of each epoch; metrics are means over the updates."""
        copy, workload, ppo = self._copies[stage.name], self._plan.facts.workload, self._job.ppo
        assert copy.trainer is not None
        staleness = 0 if copy.spec.scalar_head else self._plan.staleness
        learning = Learning(ppo, batch, max_staleness=staleness)
        updates, lengths = [], batch.lengths()
        for rows in minibatches(
            batch.rows,
            step=batch.step,
            num_epochs=workload.num_epochs,
            num_minibatches=workload.num_minibatches,
            seed=self._data.seed,
        ):
            mine = self._mine(stage, rows, lengths)
            groups = micro_batches(mine, lengths, self._plan.placement(stage.name).schedule.micro_batch_size)
            num_tokens = learning.num_tokens(rows)
            loss = training_loss(copy.spec, copy.mesh, ppo, num_tokens)
            sums = copy.trainer.train_step([learning.block(group) for group in groups], loss)
            updates.append(final_metrics(sums))
        metrics = {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
        return metrics if copy.spec.scalar_head else metrics | learning.metrics()

    def _mine(self, stage: Stage, rows: Sequence[int], lengths: Mapping[int, int]) -> tuple[int, ...]:
        """The rows of this rank's replica."""
        mesh = self._copies[stage.name].mesh
        return even_share(rows, lengths, mesh.dp_rank, mesh.layout.dp)


def _put_answers(batch: Batch, stage: Stage, row: int, values: Tensor) -> None:
    """Puts the answers for the tokens of a row [S]. A score is said at the last token, which predicts no other."""
    last = len(values) - 1
    if stage.name == "reward_score":
        values = values[last:]
    elif stage.name != "critic_value":
        values = F.pad(values[:last], (0, 1))
    batch.experience.put(stage.writes[0], row, values.clone())
