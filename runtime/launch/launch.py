"""Starts one process per rank with torch elastic and brings back what each returned.

A rank that fails leaves a record; the caller gets one sentence about the first failure and the path of its traceback.
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

from meshwright.planner.search.child_process import end_with
from meshwright.planner.search.parent_death import end_with_parent
from meshwright.profiles.errors import BadInput, MeshwrightError, RunFailed
from meshwright.runtime.device.patience import have_patience, patience
from meshwright.runtime.launch import failing
from meshwright.runtime.launch.gathering import BACKEND
from meshwright.runtime.launch.interruption import heed_again, listen, passed_on, shield_helpers
from meshwright.runtime.launch.rendezvous import Arrival, Rendezvous, address_towards, interface_of
from meshwright.runtime.launch.scratch import scratch

T = TypeVar("T")

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""What torch elastic ends the ranks for."""

_WITH_LAUNCHER = "meshwright.runtime.launch.with_launcher"
"""What the process imports first that ranks are forked from."""

_NOISY = ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api", "torch.multiprocessing.spawn")
"""Loggers that tell of what is told in a sentence here."""

_STAY_SECONDS = 2.0
"""How long a rank that lost a partner stays, so that the partner's end is seen first."""


@dataclass(frozen=True)
class Preparation:
    """How a process becomes ready for its work."""

    kind: str | None
    """Of the device it computes on: cpu or cuda; None for a process that only sends messages."""
    patience_seconds: float = 900.0
    """A collective that waits longer than this has lost a partner."""

    @property
    def may_be_forked(self) -> bool:
        """CUDA cannot be used in a fork of a process that has seen it."""
        return self.kind != "cuda"

    def make_ready(self) -> str:
        """Called in the process; answers the backend of its collectives."""
        if self.kind is None:
            return "gloo"
        from meshwright.runtime.device import host  # noqa: PLC0415 - it loads Megatron, and a rehearsal does without

        host.choose(self.kind, int(os.environ["LOCAL_RANK"]))
        host.install()
        return host.backend()


MESSAGES_ONLY = Preparation(None)


def launch(
    entry: Callable[..., T],
    *args: Any,
    num_ranks: int,
    preparation: Preparation,
    rendezvous: Rendezvous | None = None,
    logs: Path | None = None,
    preload: str | None = None,
    work: str = "",
    may_stop: bool = False,
) -> dict[int, T]:
    """Calls `entry(*args)` in `num_ranks` processes of this node, inside a process group over all nodes.

    Returns the results by global rank. `logs` keeps the traceback of a failure. With `preload` the processes are forked
    from one that has imported that module, unless they compute on CUDA. `work` is a digest of what is to be done, which
    must be the same on all nodes. Where the entry `may_stop` when it is asked to, the first signal to end asks it, here
    and in the ranks.

    Raises the BadInput of a rank as it is, RunFailed for anything else, and KeyboardInterrupt when a signal ends it.
    """
    are_forked = preload is not None and preparation.may_be_forked
    if preload:
        multiprocessing.set_forkserver_preload([_WITH_LAUNCHER, preload])
    lasting = scratch()  # before multiprocessing makes a directory
    if are_forked:
        shield_helpers()
    rendezvous = rendezvous or Rendezvous()
    rendezvous.check()
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(dir=lasting) as directory:
        failures = Path(directory) / "failures"
        failures.mkdir()
        mark = Path(directory) / "stop" if may_stop else None
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
        launcher = _Launcher(os.getpid(), rendezvous.address, failures, mark)
        try:
            with passed_on(mark) if mark else nullcontext():
                results: dict[int, T] = elastic_launch(config, _rank_main)(launcher, preparation, entry, args)
        except SignalException:
            raise KeyboardInterrupt from None
        except ChildFailedError as error:
            raise _explain(error, failures, logs, rendezvous.nodes) from None
        return results


def take_part(
    preparation: Preparation, entry: Callable[..., T], args: tuple[Any, ...], *, towards: str, **group: Any
) -> T:
    """What each rank does: join the process group that `group` describes, call, leave. On a CPU a rank is one core.

    Messages of the host go over the interface that leads to `towards`, unless the user has named one.
    """
    torch.set_num_threads(1)
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_of(address_towards(towards))):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    have_patience(preparation.patience_seconds)
    dist.init_process_group(preparation.make_ready(), timeout=patience(), **group)
    result = entry(*args)
    dist.barrier()
    dist.destroy_process_group()
    return result


@dataclass(frozen=True)
class _Launcher:
    """What a rank knows of the process that started it."""

    pid: int
    towards: str
    """The host that all nodes can reach."""
    failures: Path
    """Where a rank that fails leaves its record."""
    mark: Path | None
    """What appears when a run is asked to stop; None where it is then ended."""


def _rank_main(launcher: _Launcher, preparation: Preparation, entry: Callable[..., T], args: tuple[Any, ...]) -> T:
    """What each process that was launched runs; it ends with its launcher, and a failure leaves its record.

    A collective whose partner has left raises a RuntimeError. Its rank may end before the partner's end is noticed, and
    one that was killed leaves no record: so it waits to be terminated.
    """
    if launcher.mark:
        listen(launcher.pid, launcher.mark)
    else:
        heed_again()
    end_with_parent(os.getppid())  # the launcher, or the process that ranks are forked from, which ends with it
    end_with(launcher.pid)
    failing.keep_record(launcher.failures / f"{os.environ['RANK']}.json")
    try:
        return take_part(preparation, entry, args, towards=launcher.towards)
    except BaseException as error:
        failing.record(error)
        if isinstance(error, RuntimeError):
            time.sleep(_STAY_SECONDS)
        raise


def _explain(error: ChildFailedError, failures: Path, logs: Path | None, nodes: int) -> MeshwrightError:
    """The error to raise for the first rank that failed by itself; the others fail because it left.

    The first to be seen ended without a record, or another had left one before.
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
    elsewhere = "; where it lost another rank, that one's node says why" if nodes > 1 else ""
    return RunFailed(f"rank {rank} failed: {sentence}{elsewhere}{where}.")
