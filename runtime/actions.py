"""What each stage does on this rank: take its rows, run the stage's body, put what it wrote into the experience."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from meshwright.planner.job import Job
from meshwright.planner.plan import Plan
from meshwright.planner.program import version_of_generation
from meshwright.profiles.stages import STAGE_BY_NAME, Stage
from meshwright.runtime.admission import Admission, shared
from meshwright.runtime.batch import Batch
from meshwright.runtime.bodies import MicroBatch, forward_logprobs, forward_scalars
from meshwright.runtime.copies import WeightCopy
from meshwright.runtime.data import PromptData
from meshwright.runtime.experience import micro_batches, share
from meshwright.runtime.generation import Generator
from meshwright.runtime.learning import Learning, minibatches, training_loss
from meshwright.runtime.ppo import final_metrics
from meshwright.runtime.slots import Finish, Response


class Actions:
    """The stages of a plan on this rank."""

    def __init__(self, plan: Plan, job: Job, data: PromptData, copies: Mapping[str, WeightCopy], steps: range) -> None:
        """`steps` are those of the run; held-out batches may be run beside them."""
        self._plan, self._job, self._data, self._steps = plan, job, data, steps
        self._copies = {p.stage: copies[plan.copy_of(p.stage)] for p in plan.placements}
        self._generator = self._build_generator()
        generation = self._copies["actor_generate"]
        self._admission = Admission(plan, data, generation.mesh.dp_rank, steps) if generation.model else None
        self._version = steps.start

    def begin(self, turn: int) -> None:
        """A turn begins: it generates with this policy."""
        self._version = version_of_generation(self._plan, turn, self._steps.start)

    def run(self, stage: str, batch: Batch) -> dict[str, float]:
        """Runs a stage that this rank belongs to; returns what is worth recording of it."""
        kind = STAGE_BY_NAME[stage]
        if kind.generates:
            return self._generate(kind, batch)
        return self._train(kind, batch) if kind.trains else self._forward(kind, batch)

    def _build_generator(self) -> Generator | None:
        copy = self._copies["actor_generate"]
        if copy.model is None:
            return None
        workload, schedule = self._plan.facts.workload, self._plan.placement("actor_generate").schedule
        return Generator(
            copy.model,
            copy.spec,
            copy.mesh,
            num_slots=schedule.generation_slots,
            max_tokens=workload.max_tokens,
            max_response=workload.response.max,
            eos_token=self._data.eos_token,
            temperature=self._job.ppo.temperature,
            seed=self._data.seed,
        )

    def _generate(self, stage: Stage, batch: Batch) -> dict[str, float]:
        """Draws responses until this replica's rows are there; every rank of the replica holds all of them."""
        assert self._generator is not None
        assert self._admission is not None
        if batch.held_out:
            mesh = self._copies[stage.name].mesh
            responses = self._generator.generate(shared(self._data.held_out_batch(), mesh.dp_rank, mesh.layout.dp))
            rows = tuple(response.row for response in responses)
        else:
            admitted = self._admission.of(batch.step)
            responses = self._generator.turn(admitted.prompts, version=self._version, delivery=admitted.delivery)
            rows = self._admission.rows(responses)
        for row, response in zip(rows, responses, strict=True):
            _put_response(batch, row, response)
        return {
            "num_tokens": float(sum(len(response.tokens) for response in responses)),
            "num_truncated": float(sum(response.finish is Finish.LENGTH for response in responses)),
            "num_longest_tokens": float(max((len(response.tokens) for response in responses), default=0)),
        }

    def _forward(self, stage: Stage, batch: Batch) -> dict[str, float]:
        """Log-probabilities, values or scores of this replica's rows; ranks of the last pipeline stage hold them."""
        copy, lengths = self._copies[stage.name], batch.lengths()
        assert copy.model is not None
        mine = self._mine(stage, batch.rows, lengths)
        groups = micro_batches(mine, self._plan.placement(stage.name).schedule.micro_batch_size)
        blocks = [
            MicroBatch(tokens=batch.experience.padded("tokens", group, max(lengths[row] for row in group)))
            for group in groups
        ]
        if copy.spec.scalar_head:
            outputs = forward_scalars(copy.model, copy.mesh, blocks)
        else:
            outputs = forward_logprobs(copy.model, copy.mesh, blocks, temperature=self._job.ppo.temperature)
        for group, output in zip(groups, outputs, strict=copy.mesh.is_last_stage):
            for row, values in zip(group, output.cpu(), strict=True):
                first = lengths[row] - 1 if stage.name == "reward_score" else 0  # a score is said at the last token
                batch.experience.put(stage.writes[0], row, values[first : lengths[row]].clone())
        return {"num_tokens": float(sum(lengths[row] for row in mine))}

    def _train(self, stage: Stage, batch: Batch) -> dict[str, float]:
        """One update for each minibatch of each epoch; metrics are means over the updates."""
        copy, workload, ppo = self._copies[stage.name], self._plan.facts.workload, self._job.ppo
        assert copy.trainer is not None
        staleness = 0 if copy.spec.scalar_head else self._plan.staleness
        learning = Learning(ppo, batch, self._data.eos_token, max_staleness=staleness)
        updates = []
        for rows in minibatches(
            batch.rows,
            step=batch.step,
            num_epochs=workload.num_epochs,
            num_minibatches=workload.num_minibatches,
            seed=self._data.seed,
        ):
            mine = self._mine(stage, rows, batch.lengths())
            groups = micro_batches(mine, self._plan.placement(stage.name).schedule.micro_batch_size)
            num_tokens = learning.num_tokens(rows)
            loss = training_loss(copy.spec, copy.mesh, ppo, num_tokens)
            sums = copy.trainer.train_step([learning.block(group) for group in groups], loss)
            updates.append(final_metrics(sums))
        metrics = {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
        return metrics if copy.spec.scalar_head else metrics | learning.metrics()

    def _mine(self, stage: Stage, rows: Sequence[int], lengths: Mapping[int, int]) -> tuple[int, ...]:
        """The rows of this rank's replica."""
        mesh = self._copies[stage.name].mesh
        return share(rows, lengths, mesh.dp_rank, mesh.layout.dp)


def _put_response(batch: Batch, row: int, response: Response) -> None:
    """Fields with a value per token have it where the token is predicted: one position before its own."""
    prompt = response.prompt.tokens
    before, after = len(prompt) - 1, 1
    logprobs = [0.0] * before + list(response.logprobs) + [0.0] * after
    versions = [0] * before + list(response.versions) + [0] * after
    batch.experience.put("tokens", row, torch.tensor(prompt + response.tokens))
    batch.experience.put("prompt_lengths", row, torch.tensor([len(prompt)]))
    batch.experience.put("behaviour_logprobs", row, torch.tensor(logprobs))
    batch.experience.put("versions", row, torch.tensor(versions, dtype=torch.int32))
