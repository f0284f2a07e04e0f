"""Staleness 0 is synchronous PPO: a run of a plan equals a loop over the stages' bodies, bit for bit.

The loop has no program, no messages, no refits and no admission: each step generates with the weights that are there,
asks the four models, and trains them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.planner.job.job import Job, read_job
from meshwright.planner.plan.steps_ahead import synchronous
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.profiles.packing import assign_to_replicas, micro_batches
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import GENERATE, Role
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.inference.engine import Generator
from meshwright.runtime.inference.slots import Finish
from meshwright.runtime.messages.experience import StepExperience
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import Decoder, build_model
from meshwright.runtime.model.weights import load_weights
from meshwright.runtime.rollout.prompts import PromptData, read_data
from meshwright.runtime.training.losses import final_metrics
from meshwright.runtime.training.trainer import MicroBatch, Trainer, forward_logprobs, forward_scalars
from meshwright.runtime.training.training_batch import TrainingBatch, minibatches, training_loss
from tests.runtime.carried_out import carried_out
from tests.runtime.execution.test_train import read_lines
from tests.runtime.laws.test_ahead import DISJOINT, working_ahead
from tests.runtime.ranks import run_on_ranks
from tests.runtime.small_job import request, write_job

pytestmark = pytest.mark.slow

STEPS, ROWS = 3, 8
LOSSES = ("policy_loss", "value_loss", "approx_kl", "score", "kl_to_ref", "response_tokens")
TRAINED = {"actor_train": Role.ACTOR, "critic_train": Role.CRITIC}


def digest(model: nn.Module) -> str:
    """Of all weights, bit for bit."""
    found = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        found.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def follow(asked: RunRequest) -> dict[str, str]:
    """The digests of what this rank has trained by the end of a run of the plan."""
    run = carried_out(asked)
    copies = {name: run.copies[name] for name in TRAINED}
    return {name: digest(copy.decoder) for name, copy in copies.items() if copy.mesh.is_member}


def loop(path: Path) -> tuple[list[dict[str, float]], dict[str, str]]:
    """The metrics of each step of a plain loop on one rank, and the digests of what it has trained."""
    job = read_job(path)
    data, mesh = read_data(job, path.parent), build_mesh(Layout(), 0)
    models = {role: _model(job, path.parent, role) for role in PPO_GRAPH.roles}
    trainers = {
        stage: Trainer(
            models[role],
            mesh,
            learning_rate=job.settings.actor_learning_rate if role is Role.ACTOR else job.settings.critic_learning_rate,
            weight_decay=job.settings.weight_decay,
            max_grad_norm=job.settings.max_grad_norm,
        )
        for stage, role in TRAINED.items()
    }
    lines = []
    for step in range(STEPS):
        batch = _generated(job, data, models[Role.ACTOR], step)
        _answer(batch, job, models)
        line: dict[str, float] = {}
        for trainer in trainers.values():
            line |= _trained(job, batch, trainer)
        lines.append(line)
    return lines, {stage: digest(trainer.model) for stage, trainer in trainers.items()}


def _model(job: Job, directory: Path, role: Role) -> Decoder:
    source, mesh = directory / job.models.source(role).path, build_mesh(Layout(), 0)
    spec = read_model(source, scalar_head=role in (Role.CRITIC, Role.REWARD))
    model = build_model(spec, mesh, trainable=role in TRAINED.values())
    load_weights(model, spec, mesh, source)
    assert isinstance(model, Decoder)
    return model


def _generated(job: Job, data: PromptData, actor: Decoder, step: int) -> StepExperience:
    batch, workload = StepExperience(step=step, rows=range(data.batch_size)), job.workload
    generator = Generator(
        actor,
        actor.spec,
        build_mesh(Layout(), 0),
        num_slots=data.batch_size,
        max_tokens=workload.max_tokens,
        max_response=workload.response.max,
        eos_tokens=frozenset(data.ends.tokens),
        temperature=job.settings.temperature,
        seed=data.seed,
    )
    prompts = sorted(data.batch(step), key=lambda prompt: (len(prompt.tokens), prompt.row))
    for response in generator.generate(prompts):
        prompt = response.prompt.tokens
        before = [0.0] * (len(prompt) - 1)
        fields = {
            "tokens": torch.tensor(prompt + response.tokens),
            "prompt_lengths": torch.tensor([len(prompt)]),
            "truncated": torch.tensor([response.finish is Finish.LENGTH], dtype=torch.uint8),
            "behaviour_logprobs": torch.tensor([*before, *response.logprobs, 0.0]),
        }
        for field, values in fields.items():
            batch.experience.put(field, response.row, values)
    return batch


def _answer(batch: StepExperience, job: Job, models: Mapping[Role, Decoder]) -> None:
    """Log-probabilities, values and scores of all rows."""
    mesh = build_mesh(Layout(), 0)
    for group in _groups(batch, batch.rows):
        block = MicroBatch.pack(batch.experience.get("tokens", row) for row in group)

        def put(field: str, output: Tensor, group: Iterable[int] = group, block: MicroBatch = block) -> None:
            for row, values in zip(group, block.split_rows(output), strict=True):
                batch.experience.put(field, row, values.clone())

        for field, role in (("ref_logprobs", Role.REF), ("proximal_logprobs", Role.ACTOR)):
            put(field, forward_logprobs(models[role], mesh, [block], temperature=job.settings.temperature)[0])
        put("values", forward_scalars(models[Role.CRITIC], mesh, [block])[0])
        put("scores", forward_scalars(models[Role.REWARD], mesh, [block])[0])
    for row in batch.rows:
        for field in ("ref_logprobs", "proximal_logprobs"):
            batch.experience.put(field, row, F.pad(batch.experience.get(field, row)[:-1], (0, 1)))
        batch.experience.put("scores", row, batch.experience.get("scores", row)[-1:])


def _trained(job: Job, batch: StepExperience, trainer: Trainer) -> dict[str, float]:
    """The metrics of a step's updates of one model."""
    learning = TrainingBatch(job.settings, batch, reads=("ref_logprobs", "values"), workload=job.workload)
    updates, spec = [], trainer.model.spec
    for rows in minibatches(
        batch.rows,
        step=batch.step,
        num_epochs=job.workload.num_epochs,
        num_minibatches=job.workload.num_minibatches,
        seed=job.settings.seed,
    ):
        loss = training_loss(spec, trainer.mesh, job.settings, learning.num_tokens(rows))
        blocks = [learning.micro_batch(group) for group in _groups(batch, rows)]
        updates.append(final_metrics(trainer.train_step(blocks, loss)))
    means = {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
    return means if spec.scalar_head else means | learning.metrics()


def _groups(batch: StepExperience, rows: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    lengths, mine = batch.lengths(), list(rows)
    (dealt,) = assign_to_replicas([lengths[row] for row in mine], (1,))
    return micro_batches([mine[index] for index in dealt], lengths, Schedule(micro_batch_size=ROWS))


def test_a_synchronous_run_of_two_pools_is_a_plain_loop_bit_for_bit(tmp_path: Path) -> None:
    """The job may be stale and the plan refits and hands over: at staleness 0 none of it shows."""
    path = write_job(tmp_path, num_ranks=2)
    micro = (f"{stage}.micro_batch_size={ROWS}" for stage in (*TRAINED, "actor_logprob", "critic_value"))
    scored = (f"{stage}.micro_batch_size={ROWS}" for stage in ("reward_score", "ref_logprob"))
    pins = (*DISJOINT, *micro, *scored, "actor_generate.generation_slots=16")
    asked = working_ahead(request(path, tmp_path / "run", *pins, steps=STEPS), synchronous(PPO_GRAPH), 2)
    asked.out.mkdir()
    assert asked.plan.staleness == 0
    assert [refit.target for refit in asked.plan.refits] == [GENERATE]
    trained = {name: found for of_rank in run_on_ranks(2, follow, asked) for name, found in of_rank.items()}
    lines, expected = run_on_ranks(1, loop, path)[0]
    assert trained == expected
    for line, also in zip(lines, read_lines(asked.out / "metrics.jsonl"), strict=True):
        assert {name: line[name] for name in LOSSES} == {name: also[name] for name in LOSSES}
