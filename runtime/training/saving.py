"""Trainers on their way to disk: copied to host memory while all ranks wait, written while training goes on.

A checkpoint is first a directory with another name, to which every rank writes a file. When the disk has all of them
and a manifest, it is renamed: so one that was cut short, whatever ended the run, is never taken for whole.
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
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from meshwright.profiles.errors import BadInput, MeshwrightError, RunFailed
from meshwright.runtime.device import host, used_memory
from meshwright.runtime.device.host_copies import copied_to_host
from meshwright.runtime.training.bodies import Trainer
from meshwright.runtime.training.checkpoint import ANY_ERROR, reason_of, state_of
from meshwright.runtime.training.manifest import seal, sync


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What this rank has to write of a checkpoint, in memory that nobody changes."""

    directory: Path
    writer: FileSystemWriterAsync
    metadata: Metadata | None
    """Of all ranks; on rank 0 alone."""
    beside: Callable[[Path], None]

    @property
    def partial(self) -> Path:
        """Where it is written before it is whole."""
        return _partial(self.directory)


def take_snapshot(
    directory: Path, trainers: Mapping[str, Trainer], beside: Callable[[Path], None] = lambda _: None
) -> Snapshot:
    """Copies the trainers that the ranks of the world hold, each under its own name, for a new directory.

    Collective over the world, over a file system that it shares: a rank passes the trainers it is a member of, and
    what it writes `beside` them, given the directory as it comes to be. Raises BadInput if the directory exists, and
    RunFailed where nothing can be written there.
    """
    host.install()
    if directory.exists():
        raise BadInput(f"{directory} exists already; give a new directory for the checkpoint.")
    dist.barrier()  # until every rank has looked, nothing may appear
    if dist.get_rank() == 0:
        for left in directory.parent.glob(_partial(Path("*")).name):
            shutil.rmtree(left, ignore_errors=True)  # of a save that was cut short
        _partial(directory).mkdir(parents=True)
    dist.barrier()
    # What a rank has written it tells itself; megatron would start a server on every rank for that, which takes 4 s.
    # https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/dist_checkpointing/strategies/filesystem_async.py#L51
    vars(filesystem_async)["_results_queue"] = queue.SimpleQueue()
    # What goes wrong is raised as well.
    logging.getLogger(filesystem_async.__name__).setLevel(logging.CRITICAL)
    state = {name: state_of(name, trainer, is_loading=False) for name, trainer in trainers.items()}
    planned = _Planned()
    try:
        _copy_to_host(state, set(_storages(trainers)))
        dist_checkpointing.save(state, str(_partial(directory)), planned, async_sharded_save=True)
    except ANY_ERROR as error:
        raise _not_written(directory, error) from error
    return Snapshot(directory=directory, writer=planned.writer, metadata=planned.metadata, beside=beside)


def publish(
    snapshot: Snapshot, group: dist.ProcessGroup | None = None, behind: Callable[[], None] = lambda: None
) -> None:
    """Writes a snapshot, and renames the directory when all of it is on the disk; then rank 0 does what comes `behind`.

    Collective over the group, of all ranks. Raises RunFailed on every rank where one cannot write.
    """
    is_first = dist.get_rank() == 0
    try:
        _write(snapshot, group)
        seal(snapshot.partial, group)
        if is_first:
            snapshot.partial.rename(snapshot.directory)
            sync(snapshot.directory.parent)
            behind()
        dist.barrier(group)
    except ANY_ERROR as error:
        raise _not_written(snapshot.directory, error) from error


class Saver:
    """Publishes one rank's snapshots, one after another, in one thread of its own: the allocator has a heap for every
    thread that is started and keeps what is free in it, so that a thread for each would cost more memory each time.

    Behind a checkpoint what has been freed on the host goes back to it: the copies, and what steps have left between
    what stays, a few KiB each."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """`group` is of all ranks, over gloo, and carries nothing else."""
        self._group = group
        self._asked: queue.SimpleQueue[tuple[Snapshot, Callable[[], None]]] = queue.SimpleQueue()
        self._published = threading.Event()
        self._published.set()
        self._thread: threading.Thread | None = None
        self._error: MeshwrightError | None = None
        self._began = 0.0
        self.seconds: float | None = None
        """From the snapshot of the last one until it was on the disk; None before there was one."""

    def save(self, snapshot: Callable[[], Snapshot], behind: Callable[[], None]) -> None:
        """Takes a snapshot when the one before is published, and has it published. Raises what `publish` has raised of
        the one before."""
        self.wait()
        self._began = time.monotonic()
        taken = snapshot()
        if self._thread is None:
            self._thread = threading.Thread(target=self._publish, name="checkpoint", daemon=True)
            self._thread.start()
        self._published.clear()
        self._asked.put((taken, behind))

    def wait(self) -> None:
        """Until nothing is on its way any more. Raises what `publish` has raised, if it has."""
        self._published.wait()
        if self._error is not None:
            raise self._error

    def _publish(self) -> None:
        """One snapshot after another; the thread ends with the process."""
        while True:
            snapshot, behind = self._asked.get()
            try:
                publish(snapshot, self._group, behind)
            except MeshwrightError as error:
                self._error = error
            del snapshot, behind  # the next one is waited for without them
            used_memory.return_freed()
            self.seconds = time.monotonic() - self._began
            self._published.set()


class _Planned(TorchDistSaveShardedStrategy):
    """Megatron's way of saving up to where ranks have agreed who writes what: a file for each of them."""

    writer: FileSystemWriterAsync
    metadata: Metadata | None

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, agreed: tuple[Any, ...]) -> AsyncRequest:
        self.writer, self.metadata = writer, agreed[1]
        return AsyncRequest(None, (), [])


def _copy_to_host(state: dict[str, Any], live: set[int]) -> None:
    """What this rank writes and the next update changes, by the storages it lies in; what was gathered for the
    checkpoint stays as it is."""
    apply_factories(state)
    tensors, _ = extract_sharded_tensors(state)
    ours: list[ShardedTensor] = [
        found
        for found in nested_values(tensors)
        if is_main_replica(found.replica_id)
        and not (found.data.device.type == "cpu" and found.data.untyped_storage().data_ptr() not in live)
    ]
    for found, copy in zip(ours, copied_to_host([found.data for found in ours]), strict=True):
        found.data = copy


def _storages(trainers: Mapping[str, Trainer]) -> Iterator[int]:
    """Where weights, gradients and moments lie that training changes."""
    for trainer in trainers.values():
        tensors: list[Tensor] = [*trainer.model.parameters(), *trainer.model.buffers()]
        for part in trainer.optimizers:
            for group in part.optimizer.param_groups:
                tensors += group["params"]
            for state in part.optimizer.state.values():
                tensors += [value for value in state.values() if isinstance(value, Tensor)]
        yield from (tensor.untyped_storage().data_ptr() for tensor in tensors)


def _write(snapshot: Snapshot, group: dist.ProcessGroup | None) -> None:
    """Every rank's file and what it has beside it, and what rank 0 says of all."""
    results, pending = queue.SimpleQueue(), queue.Queue()  # type: ignore[var-annotated]
    for number, bucket in enumerate(snapshot.writer.write_buckets):
        pending.put(number)
        snapshot.writer.write_preloaded_data(
            [snapshot.writer.transforms], number, bucket, results, pending, use_fsync=True
        )
    found = [results.get()[1] for _ in snapshot.writer.write_buckets]
    try:
        snapshot.beside(snapshot.partial)
    except BadInput as error:
        found.append(error)
    everyones: list[list[Any]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyones, found, group=group)
    for result in (result for results in everyones for result in results if isinstance(result, Exception)):
        raise result
    if snapshot.metadata is not None:
        snapshot.writer.finish(snapshot.metadata, [one for results in everyones for one in results])
        save_config(CheckpointingConfig("torch_dist", 1), str(snapshot.partial))


def _partial(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.partial")


def _not_written(directory: Path, error: BaseException) -> RunFailed:
    return RunFailed(f"checkpoint {_partial(directory)} cannot be written: {reason_of(error)}; is its disk full?")
