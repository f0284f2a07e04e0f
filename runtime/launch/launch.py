"""Launch of one process per rank with torch elastic, and the results of all ranks.

A rank that fails leaves a record; the caller gets one error about the first failure and the path of its traceback.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshwright.planner.search.child_process import end_with_process
from meshwright.planner.search.parent_death import end_with_parent
from meshwright.profiles.errors import BadInput, MeshwrightError, RunFailed
from meshwright.runtime.device.process_groups import collective_timeout, set_collective_timeout
from meshwright.runtime.launch import failure_records
from meshwright.runtime.launch.interruption import forwarded_signals, listen, shield_helpers, unblock_signals
from meshwright.runtime.launch.rendezvous import Arrival, Rendezvous, interface_of, route_address
from meshwright.runtime.launch.rendezvous_handler import BACKEND
from meshwright.runtime.launch.scratch import scratch_directory

T = TypeVar("T")

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""Signals on which torch elastic ends the ranks."""

_WITH_LAUNCHER = "meshwright.runtime.launch.with_launcher"
"""The first module imported by the process that ranks are forked from."""

_REPETITIVE_LOGGERS = (
    "torch.distributed.elastic",
    "torch.distributed.elastic.agent.server.api",
    "torch.multiprocessing.spawn",
)
"""Loggers that repeat the errors raised here; they are silenced."""

_EXIT_DELAY_SECONDS = 2.0
"""Seconds that a rank which lost a peer stays alive, so that the peer's failure is seen first."""


@dataclass(frozen=True)
class ProcessSetup:
    """The device and the collective timeout that a process sets up before its work."""

    kind: str | None
    """Device that the process computes on, cpu or cuda; None for a process that only sends messages."""
    timeout_seconds: float = 900.0
    """Timeout of collectives."""

    @property
    def may_be_forked(self) -> bool:
        """False on CUDA, which cannot be used in a fork of a process that has initialised it."""
        return self.kind != "cuda"

    def set_up(self) -> str:
        """Set up the device in the rank's process and return the backend of its collectives."""
        if self.kind is None:
            return "gloo"
        from meshwright.runtime.device import host  # noqa: PLC0415 - it imports Megatron, which a rehearsal does not need

        host.choose(self.kind, int(os.environ["LOCAL_RANK"]))
        host.install()
        return host.backend()


MESSAGES_ONLY = ProcessSetup(None)


def launch(
    entry: Callable[..., T],
    *args: Any,
    num_ranks: int,
    setup: ProcessSetup,
    rendezvous: Rendezvous | None = None,
    logs: Path | None = None,
    preload: str | None = None,
    work: str = "",
    may_stop: bool = False,
) -> dict[int, T]:
    """Call `entry(*args)` in `num_ranks` processes of this node, inside a process group over all nodes.

    Returns the results by global rank. Tracebacks of a failure are written to the directory `logs`. With `preload` the
    processes are forked from one that has imported that module, unless they compute on CUDA. `work` is a digest of the
    work, which must be the same on all nodes. With `may_stop` the first terminating signal only requests a stop, here
    and in the ranks.

    Raises a rank's BadInput unchanged, RunFailed for any other failure, and KeyboardInterrupt when a signal ends it.
    """
    are_forked = preload is not None and setup.may_be_forked
    if preload:
        multiprocessing.set_forkserver_preload([_WITH_LAUNCHER, preload])
    parent = scratch_directory()  # must come before multiprocessing makes its own directory
    if are_forked:
        shield_helpers()
    rendezvous = rendezvous or Rendezvous()
    rendezvous.check()
    for logger in _REPETITIVE_LOGGERS:
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        failures = Path(directory) / "failures"
        failures.mkdir()
        stop_file = Path(directory) / "stop" if may_stop else None
        config = LaunchConfig(
            min_nodes=1 if rendezvous.attempt else rendezvous.nodes,
            max_nodes=rendezvous.nodes,
            nproc_per_node=num_ranks,
            run_id=f"meshwright-{rendezvous.port}-{rendezvous.attempt}",
            rdzv_backend=BACKEND,
            rdzv_endpoint=rendezvous.endpoint,
            rdzv_configs={
                "rendezvous": rendezvous,
                "arrival": Arrival.here(node_rank=rendezvous.node_rank, num_ranks=num_ranks, work=work),
            },
            max_restarts=0,
            monitor_interval=0.05,
            start_method="forkserver" if are_forked else "spawn",
            logs_specs=DefaultLogsSpecs(log_dir=directory),
            signals_to_handle="SIGQUIT" if may_stop else _SIGNALS,
        )
        launcher = _Launcher(os.getpid(), rendezvous.address, failures, stop_file)
        try:
            with forwarded_signals(stop_file) if stop_file else nullcontext():
                results: dict[int, T] = elastic_launch(config, _rank_main)(launcher, setup, entry, args)
        except SignalException:
            raise KeyboardInterrupt from None
        except ChildFailedError as error:
            raise _explain(error, failures, logs, rendezvous.nodes) from None
        return results


def run_in_group(
    preparation: ProcessSetup, entry: Callable[..., T], args: tuple[Any, ...], *, reachable_host: str, **group: Any
) -> T:
    """Join the process group that `group` describes, call the entry, and leave. A rank uses one CPU thread.

    gloo uses the interface on the route to `reachable_host`, unless the user has set GLOO_SOCKET_IFNAME.
    """
    torch.set_num_threads(1)
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_of(route_address(reachable_host))):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    set_collective_timeout(preparation.timeout_seconds)
    dist.init_process_group(preparation.set_up(), timeout=collective_timeout(), **group)
    result = entry(*args)
    dist.barrier()
    dist.destroy_process_group()
    return result


@dataclass(frozen=True)
class _Launcher:
    """The process that launched a rank, as the rank sees it."""

    pid: int
    reachable_host: str
    """A host that all nodes can reach."""
    failures: Path
    """Directory for the records of failed ranks."""
    stop_file: Path | None
    """File that appears when the run is asked to stop; None if a signal ends it at once."""


def _rank_main(launcher: _Launcher, setup: ProcessSetup, entry: Callable[..., T], args: tuple[Any, ...]) -> T:
    """Run one launched process; it ends with its launcher, and leaves a record if it fails.

    A collective whose peer has died raises a RuntimeError. A peer that was killed leaves no record, so this rank waits
    to be terminated: its own exit must not be noticed before the peer's.
    """
    if launcher.stop_file:
        listen(launcher.pid, launcher.stop_file)
    else:
        unblock_signals()
    end_with_parent(os.getppid())  # the launcher, or the fork server, which itself ends with the launcher
    end_with_process(launcher.pid)
    failure_records.set_record_path(launcher.failures / f"{os.environ['RANK']}.json")
    try:
        return run_in_group(setup, entry, args, reachable_host=launcher.reachable_host)
    except BaseException as error:
        failure_records.write_record(error)
        if isinstance(error, RuntimeError):
            time.sleep(_EXIT_DELAY_SECONDS)
        raise


def _explain(error: ChildFailedError, failures: Path, logs: Path | None, nodes: int) -> MeshwrightError:
    """Return the error of the rank that failed first; others fail because they lost it.

    The rank whose exit torch saw first failed first if it has no record, because it was killed; otherwise it is the one
    with the earliest record. A BadInput of any rank and an error of the whole run take precedence.
    """
    rank, failure = error.get_first_failure()
    records = {int(path.stem): json.loads(path.read_text()) for path in failures.glob("*.json")}
    for record in records.values():
        if record["is_bad_input"]:
            return BadInput(record["sentence"])
        if record["is_of_all"]:
            return RunFailed(record["sentence"])
    if rank not in records:
        end = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        return RunFailed(
            f"rank {rank} ended with {end} and no message; check the machine's memory, then run again with --resume."
        )
    rank = min(records, key=lambda number: records[number]["at_ns"])
    where = ""
    if logs is not None:
        path = logs / "failure.log"
        text = [f"rank {number}\n{record['traceback']}" for number, record in sorted(records.items())]
        where = f"; the traceback of every rank is in {path}"
        try:
            path.write_text("\n".join(text), encoding="utf-8")
        except OSError as unwritten:  # the disk may be what failed
            where = f"; {path} cannot be written: {unwritten.strerror}"
    sentence = records[rank]["sentence"].splitlines()[0]
    other_nodes = (
        "; if the connection to another rank was lost, see the output of that rank's node" if nodes > 1 else ""
    )
    return RunFailed(f"rank {rank} failed: {sentence}{other_nodes}{where}.")
