"""Export of the models that a run trains as Hugging Face directories; each rank writes its own shards."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.planner.job.job import Job
from meshwright.planner.job.model_paths import with_model_paths
from meshwright.planner.plan.plan import Plan, read_run_plan
from meshwright.profiles.errors import BadInput, require_none
from meshwright.profiles.layout import Layout, layout_violations
from meshwright.profiles.model_shape import ModelSpec, read_model
from meshwright.profiles.stages import Role
from meshwright.runtime.device.process_groups import lost_rank_error
from meshwright.runtime.execution.resume import latest_checkpoint
from meshwright.runtime.launch.launch import ProcessSetup, launch
from meshwright.runtime.model.mesh import Mesh, build_mesh
from meshwright.runtime.model.model_shard import ModelChunks, build_model, model_chunks_of
from meshwright.runtime.model.weights import load_weights, save_adapter, save_weights
from meshwright.runtime.records.run_directory import read_run_file
from meshwright.runtime.training.checkpoint import sharded_model_state
from meshwright.runtime.training.checkpoint_integrity import find_damage, require_safe_pickles
from meshwright.runtime.training.weight_copies import DTYPES

ADAPTER = "adapter"
"""Name of the directory, within the directory of a model, that holds its adapter alone."""

_UNREADABLE = (CheckpointingException, CheckpointException, OSError, RuntimeError, ValueError, KeyError, EOFError)


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model that a run trains, as one rank sees it: `model` is None outside its mesh."""

    role: Role
    spec: ModelSpec  # with the whole vocabulary, as in the checkpoint
    mesh: Mesh
    model: ModelChunks | None


def write_models(models: Iterable[TrainedModel], job: Job, directory: Path, target: Path) -> None:
    """Write each model into a directory of `target` named after its role.

    It gets the configuration and generation settings that the model started from, and the job's tokenizer if the model
    has none. Weights have the type they are computed in; those of a bf16 model are the fp32 main weights rounded to
    bf16, with which the last tokens were sampled. An adapter is merged into the weights and also written by itself to
    `ADAPTER`, unless it is on experts, for which PEFT's format depends on how `transformers` stacks them. Relative
    paths of the job start at `directory`. Collective over the world, on a shared file system; `target` appears once it
    is complete. Raises BadInput if it exists.
    """
    if target.exists():
        raise BadInput(f"{target} exists already; export overwrites nothing, so name another directory.")
    partial = _partial(target)
    dist.barrier()  # nothing may appear before every rank has checked
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)  # left by an earlier export that was interrupted
        partial.mkdir(parents=True)
    dist.barrier()
    for trained in models:
        if trained.model is not None:
            source = directory / job.models.source(trained.role).path
            save_weights(
                trained.model,
                trained.spec,
                trained.mesh,
                partial / trained.role.value,
                config_from=source,
                tokenizer=directory / job.data.tokenizer if job.data else None,
            )
            adapter = trained.spec.adapter
            if adapter and not trained.spec.adapts_experts:
                adapter_directory = partial / trained.role.value / ADAPTER
                save_adapter(
                    trained.model, trained.spec, adapter, trained.mesh, adapter_directory, base=os.path.abspath(source)
                )
        del trained  # freed before the next one is built
    dist.barrier()
    if dist.get_rank() == 0:
        partial.rename(target)
    dist.barrier()


def export_models(
    run: Path, target: Path, *, num_ranks: int = 1, models: Mapping[str, str | os.PathLike[str]]
) -> tuple[Path, ...]:
    """Write the models of a run's newest checkpoint as Hugging Face directories and return their paths.

    The export starts `num_ranks` processes on the CPU, each with a pipeline stage of one model at a time and no
    optimizer. `models` are directories, by role, that have moved since the run.
    Raises BadInput for a directory without a checkpoint, a target that exists, models that cannot be divided into
    `num_ranks` pipeline stages, and a directory whose model has another shape.
    """
    plan, run_file, checkpoint = read_run_plan(run), read_run_file(run), latest_checkpoint(run)
    if checkpoint is None:
        raise BadInput(f"{run} holds no checkpoint to export; run it with --checkpoint-every, or to its end.")
    if target.exists():
        raise BadInput(f"{target} exists already; export overwrites nothing, so name another directory.")
    directory = Path(run_file.directory)
    job = with_model_paths(run_file.job, models, directory)
    for role in plan.graph.train_stage:
        source, spec = directory / job.models.source(role).path, plan.facts.models.spec(role)
        if not (source / "config.json").is_file():
            raise BadInput(
                f"{source / 'config.json'}, from which the {role.value} of this run was loaded, is not there; restore "
                f"it to export, or give its directory as --model {role.value}=DIR."
            )
        stored = read_model(source, scalar_head=spec.scalar_head).with_balance(job.models.source(role).balance)
        if replace(stored, name=spec.name, adapter=spec.adapter) != spec.for_sequences(0):
            raise BadInput(
                f"models.{role.value}: {source} has another shape than the run's {role.value}; give the directory "
                f"that it was loaded from, as --model {role.value}=DIR."
            )
        layout = Layout(pp=num_ranks)
        require_none(layout_violations(layout, spec), f"--ranks {num_ranks}")
    try:
        launch(
            _write,
            *(plan, job, directory, checkpoint, target.absolute()),
            num_ranks=num_ranks,
            setup=ProcessSetup("cpu"),
            preload="meshwright.runtime.execution.model_export",
        )
    finally:
        shutil.rmtree(_partial(target), ignore_errors=True)
    return tuple(target / role.value for role in plan.graph.train_stage)


def _partial(target: Path) -> Path:
    """Return the directory of an export that is not complete yet."""
    return target.with_name(f"{target.name}.partial")


def _write(plan: Plan, job: Job, directory: Path, checkpoint: Path, target: Path) -> None:
    """Run one rank of the export: one model after another, so that it never holds two."""
    if reason := find_damage(checkpoint):
        raise BadInput(f"checkpoint {checkpoint} cannot be read: {reason}; give a run whose files are complete.")
    require_safe_pickles(checkpoint)
    mesh = build_mesh(Layout(pp=dist.get_world_size()), 0)
    sources = {role: directory / job.models.source(role).path for role in plan.graph.train_stage}
    write_models((_loaded(plan, role, mesh, checkpoint, sources[role]) for role in sources), job, directory, target)


def _loaded(plan: Plan, role: Role, mesh: Mesh, checkpoint: Path, source: Path) -> TrainedModel:
    """Load a model from a checkpoint of any layout; with an adapter, the frozen weights are read from `source`."""
    spec, name = plan.facts.models.spec(role), plan.graph.train_stage[role]
    model = build_model(spec, mesh, dtype=DTYPES[plan.facts.precision])
    metadata = {"dp_cp_group": mesh.groups.dp_cp}
    [chunk] = model_chunks_of(model)
    try:
        loaded = dist_checkpointing.load({name: sharded_model_state(chunk, name, metadata)}, str(checkpoint))
    except (*_UNREADABLE, pickle.UnpicklingError) as error:
        if lost := lost_rank_error(error):
            raise lost from None
        raise BadInput(
            f"checkpoint {checkpoint} cannot be read ({type(error).__name__}): its files are truncated, or are not of "
            "this run; give a run whose files are complete."
        ) from None
    if spec.adapter:
        load_weights(model, spec, mesh, source)
    trained = {key.removeprefix(f"{name}."): value for key, value in loaded[name].items()}
    chunk.load_state_dict(trained, strict=spec.adapter is None)
    return TrainedModel(role=role, spec=spec, mesh=mesh, model=model)
