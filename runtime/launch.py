"""Starts one process per rank with torch elastic and brings back what each returned.

A rank that fails leaves a record; the caller gets one sentence about the first failure and the path of its traceback.
"""

from __future__ import annotations

import datetime
import json
import logging
import multiprocessing
import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshwright.profiles.errors import BadInput, MeshwrightError, RunFailed

T = TypeVar("T")

_PATIENCE = datetime.timedelta(minutes=15)
"""A collective that waits longer than this has lost a partner."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the nodes of a run meet. Port 0 picks a free one, which only a single node can use."""

    nodes: int = 1
    address: str = "127.0.0.1"
    port: int = 0

    @classmethod
    def parse(cls, text: str, nodes: int) -> Rendezvous:
        """The rendezvous written as host:port. Raises BadInput for anything else."""
        address, _, port = text.rpartition(":")
        if not address or not port.isdigit() or int(port) > 65535:
            raise BadInput(f"--rendezvous {text!r} is not host:port; write it like 10.0.0.1:29500.")
        return cls(nodes=nodes, address=address, port=int(port))

    def check_free(self) -> None:
        """Raises BadInput when a single node's port is taken; with several nodes the first node may hold it."""
        if self.nodes > 1 or self.port == 0:
            return
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((self.address, self.port))
            except OSError as error:
                raise BadInput(
                    f"--rendezvous {self.address}:{self.port} cannot be used ({error.strerror}); give another port."
                ) from None


def with_megatron() -> str:
    """Makes a process ready to compute; the backend of its collectives."""
    from meshwright.runtime import host  # noqa: PLC0415 - it loads Megatron, and a rehearsal does without

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    host.install()
    return host.backend()


def with_messages_only() -> str:
    """A process that computes nothing needs no more than gloo."""
    return "gloo"


def launch(
    entry: Callable[..., T],
    *args: Any,
    num_ranks: int,
    rendezvous: Rendezvous | None = None,
    logs: Path | None = None,
    prepare: Callable[[], str] = with_megatron,
    preload: str | None = None,
) -> dict[int, T]:
    """Calls `entry(*args)` in `num_ranks` processes of this node, inside a process group over all nodes.

    Returns the results by global rank. `logs` keeps the traceback of a failure. Raises the BadInput of a rank as it is,
    and RunFailed for anything else. With `preload` the processes are forked from one that has imported that module.
    """
    if preload:
        multiprocessing.set_forkserver_preload([preload])
    rendezvous = rendezvous or Rendezvous()
    rendezvous.check_free()
    for noisy in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as scratch:
        failures = Path(scratch) / "failures"
        failures.mkdir()
        config = LaunchConfig(
            min_nodes=rendezvous.nodes,
            max_nodes=rendezvous.nodes,
            nproc_per_node=num_ranks,
            run_id=f"meshwright-{rendezvous.port}",
            rdzv_backend="c10d",
            rdzv_endpoint=f"{rendezvous.address}:{rendezvous.port}",
            max_restarts=0,
            monitor_interval=0.05,
            start_method="forkserver" if preload else "spawn",
            local_addr=rendezvous.address if rendezvous.nodes == 1 else None,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
        )
        try:
            results: dict[int, T] = elastic_launch(config, _rank_main)(prepare, entry, args, str(failures))
        except SignalException:
            raise KeyboardInterrupt from None
        except ChildFailedError as error:
            raise _explain(error, failures, logs) from None
        return results


def _rank_main(prepare: Callable[[], str], entry: Callable[..., T], args: tuple[Any, ...], failures: str) -> T:
    """What each process runs: join the process group, call, leave. On a CPU a rank is one core."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    try:
        dist.init_process_group(prepare(), timeout=_PATIENCE)
        result = entry(*args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        record = {
            "sentence": str(error) if isinstance(error, MeshwrightError) else f"{type(error).__name__}: {error}",
            "is_bad_input": isinstance(error, BadInput),
            "traceback": traceback.format_exc(),
        }
        Path(failures, f"{rank}.json").write_text(json.dumps(record), encoding="utf-8")
        raise
    return result


def _explain(error: ChildFailedError, failures: Path, logs: Path | None) -> MeshwrightError:
    """The error to raise for the first rank that failed by itself; the others fail because it left."""
    rank, failure = error.get_first_failure()
    records = {int(path.stem): json.loads(path.read_text()) for path in failures.glob("*.json")}
    for record in records.values():
        if record["is_bad_input"]:
            return BadInput(record["sentence"])
    if rank not in records:
        end = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        return RunFailed(
            f"rank {rank} ended with {end} and no message; check the machine's memory, then run again with --resume."
        )
    where = ""
    if logs is not None:
        path = logs / "failure.log"
        text = [f"rank {number}\n{record['traceback']}" for number, record in sorted(records.items())]
        path.write_text("\n".join(text), encoding="utf-8")
        where = f"; the traceback of every rank is in {path}"
    sentence = records[rank]["sentence"].splitlines()[0]
    return RunFailed(f"rank {rank} failed: {sentence}{where}.")
