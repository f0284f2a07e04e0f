"""Replay of a batch whose updates a run has skipped, in one process, to find the rows with non-finite numbers."""

from __future__ import annotations

from pathlib import Path

from meshwright.planner.job.graph_losses import stage_loss
from meshwright.planner.job.job import Job
from meshwright.planner.plan.plan import Plan, read_plan
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.runtime.execution.resume import checkpoint_of, saved_steps
from meshwright.runtime.launch.launch import ProcessSetup, launch
from meshwright.runtime.model.kernel_choice import PLAIN
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.model.weights import load_weights
from meshwright.runtime.records.results import BatchReplay, UpdateReplay
from meshwright.runtime.records.run_directory import read_run_file
from meshwright.runtime.records.version_gap import Gap
from meshwright.runtime.rollout.prompts import read_data
from meshwright.runtime.training.bad_steps import SkippedBatch, non_finite_metric, read_skipped
from meshwright.runtime.training.checkpoint import load_trainers
from meshwright.runtime.training.trainer import Trainer
from meshwright.runtime.training.training_batch import TrainingBatch, minibatches, training_loss
from meshwright.runtime.training.weight_copies import DTYPES, build_trainer, sampling_spec


def replay_batch(path: Path) -> BatchReplay:
    """Train on a batch from the `skipped` directory of a run as the run did, in one process on the CPU.

    Nothing in the run's directory changes. The weights are those of the newest checkpoint from before the batch; they
    are exactly the run's only if that checkpoint is of the batch's own step. Raises BadInput for a file that is not
    such a batch, or is not in the directory of its run.
    """
    skipped, run = read_skipped(path), path.resolve().parent.parent
    plan, run_file = read_plan(run / "plan.json"), read_run_file(run)
    if skipped.stage not in plan.graph.train_stage.values():
        raise BadInput(
            f"{path} is a batch of {skipped.stage!r}, which is not a training stage; name a file in the "
            "`skipped` directory of a run."
        )
    if functions := stage_loss(run_file.job, plan.stage(skipped.stage)).functions:
        raise BadInput(
            f"{path} is a batch of {skipped.stage}, which trains with {functions[0]}, and a replay runs no code of the "
            "job's own; read the file with safetensors."
        )
    results = launch(
        _replay,
        *(plan, run_file.job, Path(run_file.directory), run, skipped),
        num_ranks=1,
        setup=ProcessSetup("cpu"),
        preload="meshwright.runtime.execution.replay",
    )
    return results[0]


def _replay(plan: Plan, job: Job, directory: Path, run: Path, skipped: SkippedBatch) -> BatchReplay:
    role = plan.stage(skipped.stage).role
    stored, mesh = plan.facts.models.spec(role), build_mesh(Layout(), 0)
    spec = stored if stored.scalar_head else sampling_spec(stored, read_data(job, directory).num_tokens)
    model = build_model(spec, mesh, dtype=DTYPES[plan.facts.precision], trainable=True)
    load_weights(model, stored, mesh, directory / job.models.source(role).path)
    trainer = build_trainer(model, mesh, role, job, PLAIN)
    step = max((one for one in saved_steps(run) if one <= skipped.batch.step), default=0)
    if step:
        load_trainers(checkpoint_of(run, step), {skipped.stage: trainer})
    trainer.set_learning_rate(skipped.settings.learning_rate(role, skipped.batch.step))
    return BatchReplay(
        stage=skipped.stage,
        step=skipped.batch.step,
        weights_of_step=step,
        reasons=skipped.reasons,
        updates=_updates(plan, job, trainer, skipped),
    )


def _updates(plan: Plan, job: Job, trainer: Trainer, skipped: SkippedBatch) -> tuple[UpdateReplay, ...]:
    batch = TrainingBatch(
        skipped.settings,
        skipped.batch,
        reads=plan.stage(skipped.stage).reads,
        workload=plan.facts.workload,
        importance_sampling=skipped.importance_sampling,
        loss=stage_loss(job, plan.stage(skipped.stage)),
    )
    updates = []
    for number, rows in enumerate(
        minibatches(
            skipped.batch.rows,
            step=skipped.batch.step,
            num_epochs=skipped.num_epochs,
            num_minibatches=skipped.num_minibatches,
            seed=skipped.settings.seed,
        )
    ):
        num_tokens, divisor = batch.num_tokens(rows), batch.divisor(rows)
        source = stage_loss(job, plan.stage(skipped.stage)).source
        loss = training_loss(trainer.model.spec, trainer.mesh, skipped.settings, num_tokens, divisor, source=source)
        micro_batches = {row: batch.micro_batch([row]) for row in rows}
        # The condition rejects every update, so that only metrics are computed.
        metrics_by_row = (
            (row, trainer.train_step([micro_batch], loss, condition=lambda _: False))
            for row, micro_batch in micro_batches.items()
        )
        bad = tuple(row for row, metrics in metrics_by_row if non_finite_metric(metrics, number))
        _, metrics = Gap.split(trainer.train_step(list(micro_batches.values()), loss))
        updates.append(UpdateReplay(rows=tuple(rows), metrics=metrics, bad_rows=bad))
    return tuple(updates)
