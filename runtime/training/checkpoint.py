"""Sharded checkpoints of trainers, which may be loaded in another layout than they were saved in.

A checkpoint holds weights, fp32 main weights, moments and update counts. `saving` writes what `state_of` returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.profiles.errors import BadInput
from meshwright.runtime.device import host
from meshwright.runtime.device.lost_partner import lost_rank_error
from meshwright.runtime.model.adapted import is_adapter_parameter
from meshwright.runtime.model.model_shard import Decoder, model_chunks_of
from meshwright.runtime.training.bodies import Trainer
from meshwright.runtime.training.plain_pickles import require_safe_pickles

ANY_ERROR = (Exception, CheckpointException)
"""Any error of loading or saving; torch's CheckpointException does not derive from Exception."""

_REMEDY = "it is incomplete or of another job, so remove it, or start again in another directory"


def load_trainers(directory: Path, trainers: Mapping[str, Trainer]) -> None:
    """Loads trainers from a directory that `saving` wrote, in whatever layouts they were then.

    Collective over the world. Raises BadInput if the directory is not such a checkpoint, and the error of the
    collective if another rank exits meanwhile.
    """
    host.install()
    if not directory.is_dir():
        raise BadInput(f"there is no checkpoint {directory}; give a directory that a run has saved.")
    require_safe_pickles(directory)
    state = {name: sharded_trainer_state(name, trainer, is_loading=True) for name, trainer in trainers.items()}
    try:
        loaded = dist_checkpointing.load(state, str(directory))
    except ANY_ERROR as error:  # megatron, torch and pickle raise errors of any type for a truncated or foreign file
        if lost := lost_rank_error(error):
            raise lost from None
        raise BadInput(f"checkpoint {directory} cannot be read: {describe_error(error)}; {_REMEDY}.") from error
    for name, trainer in trainers.items():
        for number, chunk in enumerate(model_chunks_of(trainer.model)):
            chunk_state = loaded[name][f"model{number}"]
            weights = {key.removeprefix(f"{name}."): value for key, value in chunk_state.items()}
            chunk.load_state_dict(weights, strict=chunk.spec.adapter is None)
        for number, optimizer in enumerate(trainer.optimizers):
            _load_optimizer(optimizer, loaded[name]["settings"], loaded[name]["param_states"][number])


def describe_error(error: BaseException) -> str:
    """The type and first line of an error; for a CheckpointException those of its first rank's error."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{f': {lines[0][:200]}' if lines else ''}".rstrip(".")


def sharded_trainer_state(name: str, trainer: Trainer, *, is_loading: bool) -> dict[str, Any]:
    """A trainer's state as Megatron's sharded tensors and objects, whose keys start with `name`."""
    groups = trainer.mesh.groups
    metadata = {"dp_cp_group": groups.dp_cp, "distrib_optim_sharding_type": "fully_reshardable"}
    chunks = {
        f"model{number}": sharded_model_state(chunk, name, metadata)
        for number, chunk in enumerate(model_chunks_of(trainer.model))
    }
    optimizers = [
        optimizer.sharded_state_dict(chunks, is_loading=is_loading, metadata=metadata)
        for optimizer in trainer.optimizers
    ]
    param_states = {number: optimizer.pop("param_state") for number, optimizer in enumerate(optimizers)}
    # Megatron would write the settings from rank 0 of the world, which may not hold this trainer.
    replica = (0, groups.mp.rank(), groups.dp_cp.rank())
    # The settings of all optimizers of a trainer are the same.
    settings = ShardedObject(f"{name}.settings", optimizers[0], (1,), (0,), replica_id=replica)
    return {**chunks, "settings": settings, "param_states": param_states}


def sharded_model_state(chunk: Decoder, name: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """The trained weights of a chunk as Megatron's sharded tensors: its adapter if it has one, else all."""
    state: dict[str, Any] = chunk.sharded_state_dict(prefix=f"{name}.", metadata=metadata)
    return {key: value for key, value in state.items() if chunk.spec.adapter is None or is_adapter_parameter(key)}


def _load_optimizer(optimizer: DistributedOptimizer, settings: dict[str, Any], param_state: dict[str, Any]) -> None:
    """Loads an optimizer with Megatron's functions, but keeps the job's learning rate and other settings, and the count
    of updates.

    Megatron would take the settings from the checkpoint. It looks for the step count of torch's AdamW among the
    tensors, where it was not saved, and gives all parameters one shared tensor for it, so each update would be counted
    once per parameter:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/optimizer/distrib_optimizer.py#L818
    """
    job_settings = [
        {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(settings)
    for group, group_settings in zip(optimizer.param_groups, job_settings, strict=True):
        group.update(group_settings)
    parameter_states = optimizer.optimizer.state.values()
    counts = [state.pop("step") for state in parameter_states]
    optimizer.load_parameter_state_from_fully_reshardable(param_state)
    for state, count in zip(parameter_states, counts, strict=True):
        state["step"] = count.clone()
