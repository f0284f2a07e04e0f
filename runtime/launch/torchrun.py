"""Joining a run as a rank that torchrun, or another launcher with its environment variables, has started.

Ranks find each other in the launcher's store. The first rank of each node checks the input and the others wait for it,
so that an error is reported once per node.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from meshwright.planner.search.child_process import end_with_process
from meshwright.profiles.errors import BadInput, MeshwrightError, RunFailed
from meshwright.runtime.launch.interruption import listen
from meshwright.runtime.launch.launch import ProcessSetup, run_in_group
from meshwright.runtime.launch.rendezvous import Arrival, is_launched_rank, node_order

T = TypeVar("T")

_TIMEOUT = timedelta(minutes=10)
"""Time for all ranks of a launcher to appear."""


@dataclass(frozen=True, kw_only=True)
class LaunchedRank:
    """This process's rank and world, from the launcher's environment variables. Ranks of a node are consecutive."""

    rank: int
    local_rank: int
    num_ranks: int
    ranks_per_node: int
    address: str
    restarts: int = 0
    """Number of times that the launcher has restarted the ranks."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self | None:
        """Read the environment variables; None if no launcher has started this process."""
        if not is_launched_rank(environment):
            return None
        num_ranks = int(environment["WORLD_SIZE"])
        return cls(
            rank=int(environment["RANK"]),
            local_rank=int(environment["LOCAL_RANK"]),
            num_ranks=num_ranks,
            ranks_per_node=int(environment.get("LOCAL_WORLD_SIZE", num_ranks)),
            address=environment["MASTER_ADDR"],
            restarts=int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)),
        )

    @property
    def node(self) -> int:
        """The number of this process's node, as the launcher counts."""
        return self.rank // self.ranks_per_node

    @property
    def num_nodes(self) -> int:
        """Number of nodes that the launcher has started ranks on."""
        return self.num_ranks // self.ranks_per_node

    def require(self, nodes: int, ranks_per_node: int) -> None:
        """Raises BadInput unless the launcher has started the plan's nodes and ranks."""
        if (self.num_ranks, self.ranks_per_node) != (nodes * ranks_per_node, ranks_per_node):
            raise BadInput(
                f"{self.ranks_per_node} of {self.num_ranks} ranks were started on this node and the plan has "
                f"{nodes} nodes of {ranks_per_node}; use torchrun --nnodes {nodes} --nproc-per-node {ranks_per_node}."
            )
        if self.rank % ranks_per_node != self.local_rank:
            raise BadInput(
                f"rank {self.rank} was started as local rank {self.local_rank} of {ranks_per_node}; ranks of a node "
                "must be consecutive, as torchrun makes them."
            )


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """The settings of this process from the user's command line.

    `preparation` sets up the process. `node_rank` is this node's number in the plan if the user gave one. `work` is a
    digest of what the process is to run, which has to be equal on all nodes, `logs` the directory for tracebacks,
    `token` the secret token of the run.
    """

    preparation: ProcessSetup
    node_rank: int | None
    work: str
    logs: Path
    token: str = field(default="", repr=False)


def join(
    launched_rank: LaunchedRank, options: NodeOptions, check: Callable[[], None], entry: Callable[..., T], *args: Any
) -> dict[int, T]:
    """Call `check()` on the first rank of each node, then `entry(*args)` on every rank, inside the group of all ranks.

    This process ends with its parent, and a terminating signal asks it to stop. Returns the result keyed by this
    rank's number in the plan. Raises a BadInput unchanged, and RunFailed for any other failure, whose traceback is
    written to a file.
    """
    listen()
    end_with_process(os.getppid())
    rank = launched_rank.rank
    try:
        store = _store()
        if launched_rank.local_rank == 0:
            check()
        rank = _node_number(store, launched_rank, options) * launched_rank.ranks_per_node + launched_rank.local_rank
        group = {"store": PrefixStore("group", store), "rank": rank, "world_size": launched_rank.num_ranks}
        return {rank: run_in_group(options.preparation, entry, args, reachable_host=launched_rank.address, **group)}
    except MeshwrightError:
        raise
    except Exception as error:
        path = options.logs / f"failure-{rank}.log"
        options.logs.mkdir(parents=True, exist_ok=True)
        path.write_text(traceback.format_exc(), encoding="utf-8")
        lines = str(error).splitlines() or [""]
        raise RunFailed(
            f"rank {rank} failed: {type(error).__name__}: {lines[0]}; if the connection to another rank was lost, see "
            f"that rank's output; the traceback is in {path}."
        ) from None


def _store() -> Store:
    """Return the store that the launcher's environment describes."""
    store, _, _ = next(rendezvous("env://", timeout=_TIMEOUT))
    return PrefixStore(f"meshwright/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _node_number(store: Store, launched_rank: LaunchedRank, options: NodeOptions) -> int:
    """Return this node's number in the plan.

    The first rank of each node writes its arrival to the store and reads those of all nodes, from which each computes
    the same order (`node_order`). The other ranks wait for it.
    """
    nodes = range(launched_rank.num_nodes)
    if launched_rank.local_rank == 0:
        arrival = Arrival.here(node_rank=options.node_rank, num_ranks=launched_rank.ranks_per_node, work=options.work)
        store.set(f"arrival/{launched_rank.node}", arrival.message(options.token))
        order = node_order([Arrival.parse(store.get(f"arrival/{node}"), options.token) for node in nodes])
        store.set(f"place/{launched_rank.node}", str(order[launched_rank.node]))
    store.wait([f"place/{node}" for node in nodes], _TIMEOUT)
    return int(store.get(f"place/{launched_rank.node}"))
