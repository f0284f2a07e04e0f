"""Sharded checkpoints of trainers: weights, fp32 main weights, moments and update counts, loadable in any layout.

Saving is asynchronous: trainers are copied to host memory while all ranks wait, and written during training. A
checkpoint is first written under another directory name, one file by every rank. When all files and a manifest are on
disk, the directory is renamed, so an incomplete checkpoint is never mistaken for a complete one.
"""

from __future__ import annotations

import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from meshwright.profiles.errors import BadInput, MeshwrightError, RunFailed
from meshwright.runtime.device import host, used_memory
from meshwright.runtime.device.host_copies import copy_to_host
from meshwright.runtime.device.process_groups import lost_rank_error
from meshwright.runtime.model.adapters import is_trained_parameter
from meshwright.runtime.model.model_shard import Decoder, model_chunks_of
from meshwright.runtime.training.checkpoint_integrity import fsync_directory, require_safe_pickles, write_manifest
from meshwright.runtime.training.trainer import Trainer

ANY_ERROR = (Exception, CheckpointException)
"""Any error of loading or saving; torch's CheckpointException does not derive from Exception."""

_REMEDY = "it is incomplete or of another job, so remove it, or start again in another directory"


def load_trainers(directory: Path, trainers: Mapping[str, Trainer]) -> None:
    """Loads trainers from a directory that `checkpoint` wrote, in whatever layouts they were then.

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
    """The type and first line of an error; for a CheckpointException those of the first failed rank."""
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
    """The trained weights of a chunk as Megatron's sharded tensors: its adapter and a scalar head if it has an adapter,
    else all."""
    state: dict[str, Any] = chunk.sharded_state_dict(prefix=f"{name}.", metadata=metadata)
    return {key: value for key, value in state.items() if is_trained_parameter(chunk.spec, key)}


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


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """This rank's part of a checkpoint, in host memory that training does not change."""

    directory: Path
    writer: FileSystemWriterAsync
    metadata: Metadata | None
    """Metadata of all ranks' files; only on rank 0."""
    write_extra: Callable[[Path], None]

    @property
    def partial(self) -> Path:
        """The directory that is written to until the checkpoint is complete."""
        return _partial(self.directory)


def take_snapshot(
    directory: Path, trainers: Mapping[str, Trainer], write_extra: Callable[[Path], None] = lambda _: None
) -> Snapshot:
    """Copies the trainers of all ranks to host memory, each under its own name, to be saved to a new directory.

    Collective over the world, on a shared file system. A rank passes the trainers that it is a member of, and in
    `write_extra` a function that writes further files to the directory that it is given. Raises BadInput if the
    directory exists, and RunFailed if it cannot be written.
    """
    host.install()
    if directory.exists():
        raise BadInput(f"{directory} exists already; give a new directory for the checkpoint.")
    dist.barrier()  # every rank checks that the directory does not exist before it is made
    if dist.get_rank() == 0:
        for incomplete in directory.parent.glob(_partial(Path("*")).name):
            shutil.rmtree(incomplete, ignore_errors=True)  # left by a save that was interrupted
        _partial(directory).mkdir(parents=True)
    dist.barrier()
    # Results of writing stay within the process; megatron would start a server on every rank for them, which takes 4 s.
    # https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/dist_checkpointing/strategies/filesystem_async.py#L51
    vars(filesystem_async)["_results_queue"] = queue.SimpleQueue()
    # Errors are raised as well, so logging them again is noise.
    logging.getLogger(filesystem_async.__name__).setLevel(logging.CRITICAL)
    state = {name: sharded_trainer_state(name, trainer, is_loading=False) for name, trainer in trainers.items()}
    strategy = _PlanOnlyStrategy()
    try:
        _copy_to_host(state, set(_storages(trainers)))
        dist_checkpointing.save(state, str(_partial(directory)), strategy, async_sharded_save=True)
    except ANY_ERROR as error:
        raise _not_written(directory, error) from error
    return Snapshot(directory=directory, writer=strategy.writer, metadata=strategy.metadata, write_extra=write_extra)


def publish(
    snapshot: Snapshot, group: dist.ProcessGroup | None = None, on_published: Callable[[], None] = lambda: None
) -> None:
    """Writes a snapshot and renames the directory when all of it is on disk; then rank 0 calls `on_published`.

    Collective over the group, which has all ranks. Raises RunFailed on every rank if one of them cannot write.
    """
    is_first = dist.get_rank() == 0
    try:
        _write(snapshot, group)
        write_manifest(snapshot.partial, group)
        if is_first:
            snapshot.partial.rename(snapshot.directory)
            fsync_directory(snapshot.directory.parent)
            on_published()
        dist.barrier(group)
    except ANY_ERROR as error:
        raise _not_written(snapshot.directory, error) from error


class Saver:
    """Publishes one rank's snapshots, one after another, in a single thread.

    The allocator makes a heap for every thread and keeps its free memory, so a new thread for each checkpoint would use
    more memory each time. After each checkpoint, freed host memory is returned to the system: that of the copies, and
    the few KiB of fragments that every step leaves.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """`group` is a gloo group of all ranks that carries nothing else."""
        self._group = group
        self._requests: queue.SimpleQueue[tuple[Snapshot, Callable[[], None]]] = queue.SimpleQueue()
        self._published = threading.Event()
        self._published.set()
        self._thread: threading.Thread | None = None
        self._error: MeshwrightError | None = None
        self._began = 0.0
        self.seconds: float | None = None
        """Seconds that the last checkpoint took, from its snapshot until it was on disk; None before the first."""

    def save(self, snapshot: Callable[[], Snapshot], on_published: Callable[[], None]) -> None:
        """Takes a snapshot once the previous one is published, and starts to publish it.

        Raises the error of the previous `publish`, if it failed.
        """
        self.wait()
        self._began = time.monotonic()
        taken = snapshot()
        if self._thread is None:
            self._thread = threading.Thread(target=self._publish, name="checkpoint", daemon=True)
            self._thread.start()
        self._published.clear()
        self._requests.put((taken, on_published))

    def wait(self) -> None:
        """Waits until no checkpoint is being written. Raises the error of `publish`, if it failed."""
        self._published.wait()
        if self._error is not None:
            raise self._error

    def _publish(self) -> None:
        """Publishes one snapshot after another; the thread ends with the process."""
        while True:
            snapshot, on_published = self._requests.get()
            try:
                publish(snapshot, self._group, on_published)
            except MeshwrightError as error:
                self._error = error
            del snapshot, on_published  # so that their memory is free while the thread waits for the next
            used_memory.trim_host_memory()
            self.seconds = time.monotonic() - self._began
            self._published.set()


class _PlanOnlyStrategy(TorchDistSaveShardedStrategy):
    """Megatron's saving strategy, which stops after the ranks have agreed on what each writes (one file per rank)."""

    writer: FileSystemWriterAsync
    metadata: Metadata | None

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, agreed: tuple[Any, ...]) -> AsyncRequest:
        self.writer, self.metadata = writer, agreed[1]
        return AsyncRequest(None, (), [])


def _copy_to_host(state: dict[str, Any], live: set[int]) -> None:
    """Replaces the tensors that this rank writes by copies on the host.

    A host tensor whose storage is not in `live`, the storages that training changes, was gathered for the checkpoint
    and needs no copy.
    """
    apply_factories(state)
    tensors, _ = extract_sharded_tensors(state)
    to_copy: list[ShardedTensor] = [
        sharded
        for sharded in nested_values(tensors)
        if is_main_replica(sharded.replica_id)
        and not (sharded.data.device.type == "cpu" and sharded.data.untyped_storage().data_ptr() not in live)
    ]
    for sharded, copy in zip(to_copy, copy_to_host([sharded.data for sharded in to_copy]), strict=True):
        sharded.data = copy


def _storages(trainers: Mapping[str, Trainer]) -> Iterator[int]:
    """Yields the addresses of the storages that training changes: weights, gradients and moments."""
    for trainer in trainers.values():
        tensors: list[Tensor] = [*trainer.model.parameters(), *trainer.model.buffers()]
        for part in trainer.optimizers:
            for group in part.optimizer.param_groups:
                tensors += group["params"]
            for state in part.optimizer.state.values():
                tensors += [value for value in state.values() if isinstance(value, Tensor)]
        yield from (tensor.untyped_storage().data_ptr() for tensor in tensors)


def _write(snapshot: Snapshot, group: dist.ProcessGroup | None) -> None:
    """Writes this rank's file and the further files of `write_extra`, and on rank 0 the metadata of all ranks' files.

    Collective over the group; raises the first error of any rank.
    """
    results, pending = queue.SimpleQueue(), queue.Queue()  # type: ignore[var-annotated]
    for number, bucket in enumerate(snapshot.writer.write_buckets):
        pending.put(number)
        snapshot.writer.write_preloaded_data(
            [snapshot.writer.transforms], number, bucket, results, pending, use_fsync=True
        )
    local = [results.get()[1] for _ in snapshot.writer.write_buckets]
    try:
        snapshot.write_extra(snapshot.partial)
    except BadInput as error:
        local.append(error)
    per_rank: list[list[Any]] = [[]] * dist.get_world_size()
    dist.all_gather_object(per_rank, local, group=group)
    for result in (result for results in per_rank for result in results if isinstance(result, Exception)):
        raise result
    if snapshot.metadata is not None:
        snapshot.writer.finish(snapshot.metadata, [result for results in per_rank for result in results])
        save_config(CheckpointingConfig("torch_dist", 1), str(snapshot.partial))


def _partial(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.partial")


def _not_written(directory: Path, error: BaseException) -> RunFailed:
    return RunFailed(f"checkpoint {_partial(directory)} cannot be written: {describe_error(error)}; is its disk full?")
