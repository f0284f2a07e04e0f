"""The rendezvous handler that brings the nodes of a run together, on top of torch elastic's c10d rendezvous.

torch has the store (TCPStore, PrefixStore), the consensus on who takes part (DynamicRendezvousHandler with
C10dRendezvousBackend), the exchange of messages and the barrier (torch.distributed.elastic.utils.store), and the agent
that calls this handler. This module adds what torch lacks:

- The store listens on the address of the rendezvous only, where torch's c10d backend listens on every network.
- A port that another program or another run holds is refused. torch's c10d backend waits for the former in C++, where
  no signal is handled, and joins the store of the latter. Calls that block run in a separate thread here, so that the
  waiting main thread handles signals.
- Nodes that run different work are refused, and the others are put in the plan's order, by their node ranks if they
  have any. torch's static rendezvous needs a node rank of every node and compares nothing.
- A waiting node reports for whom it waits, and one that times out reports how many joined.
- A node whose heartbeat stops ends the run on the others. torch compares the clocks of the nodes to find such a node,
  and does not tell the agent that it has left.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.elastic.utils.store import barrier, synchronize

from meshwright.profiles.errors import BadInput, RunFailed
from meshwright.runtime.launch.interruption import nothing_to_finish
from meshwright.runtime.launch.rendezvous import (
    Arrival,
    Rendezvous,
    is_local_address,
    listening_socket,
    node_order,
    route_address,
)

T = TypeVar("T")

_POLL_SECONDS = 0.1
"""Timeout of each partial wait; Python runs signal handlers only between two of them."""


def call_in_thread(call: Callable[[], T], seconds: float | None = None) -> T:
    """Run `call` in another thread, and return its result or raise its error.

    Raises TimeoutError if it takes longer than `seconds`; the thread then continues, as it does when a signal ends the
    wait.
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="aside", daemon=True)
    thread.start()
    deadline = None if seconds is None else time.monotonic() + seconds
    while thread.is_alive():
        thread.join(_POLL_SECONDS)
        if deadline is not None and time.monotonic() > deadline and thread.is_alive():
            raise TimeoutError(f"no answer within {seconds:g} s")
    if raised:
        raise raised[0]
    return returned[0]


_FIRST_SECONDS, _NEXT_SECONDS = 5.0, 60.0
"""Seconds before the first message, which nodes that start together never see, and between two messages."""


@contextmanager
def waiting_messages(note: Callable[[], str]) -> Iterator[None]:
    """Context in which `note()`, unless empty, is written to standard error after a few seconds and then regularly."""
    closed = threading.Event()

    def write() -> None:
        pause = _FIRST_SECONDS
        while not closed.wait(pause):
            with suppress(DistError):  # the store is gone, which the waiting thread notices too
                if message := note():
                    sys.stderr.write(f"{message}\n")
                    sys.stderr.flush()
            pause = _NEXT_SECONDS

    thread = threading.Thread(target=write, name="wait notes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join()


def waiting_message(place: Rendezvous, began: float, came: int, missing: Sequence[int]) -> str:
    """Return the message of a node that has waited since `began`, a value of `time.time()`; empty if all have joined.

    `came` is the number of nodes that have joined, itself included; `missing` are the node ranks not yet present, if
    nodes have ranks.
    """
    since, until = (time.strftime("%H:%M:%S", time.localtime(at)) for at in (began, began + place.timeout_seconds))
    missing_ranks = (
        f" (node rank {', '.join(map(str, missing[:8]))}{', ...' if len(missing) > 8 else ''})" if missing else ""
    )
    left = place.nodes - came
    if left <= 0:
        return ""
    nodes = "1 node" if left == 1 else f"{left} nodes"
    return (
        f"waiting at {place.endpoint} for {nodes} of {place.nodes}{missing_ranks} since {since}, until {until}: start "
        "`meshwright run` there with the same --rendezvous."
    )


BACKEND = "meshwright"

_STORE_TIMEOUT = timedelta(seconds=60)
"""A store that takes longer to answer counts as lost."""
HEARTBEAT_SECONDS = 5.0
"""Seconds between two heartbeats of a node."""
_LAST_CALL = timedelta(seconds=20)
"""Time that nodes wait for missing nodes in a later attempt (`last_call` of torch elastic)."""
_LEAVE_SECONDS, _CONNECT_SECONDS, _RETRY_SECONDS = 1.0, 2.0, 0.2
_PROBE_SECONDS = 15.0
"""A server that takes longer to answer is no store."""
_STATE, _GATHERS, _HAS_MET = "state of meshwright", "gathers", "has met"
"""Key and values in the store that identify it as ours: its nodes still gather, or have met."""
_stores: dict[str, TCPStore] = {}
"""Stores by endpoint; a process that hosts one does so as long as it lives."""
HEARTBEAT_TIMEOUT_SECONDS = 40.0
"""Seconds without a heartbeat after which a node counts as lost. A thread sends the heartbeats, so computing does not
delay them. It is shorter than the deadlines of ranks (`planner.program.durations`): a rank whose deadline passes could
report only that it waits."""


class NodeRendezvousHandler(DynamicRendezvousHandler):
    """The rendezvous handler of one node. torch elastic creates it, once per agent."""

    rendezvous: Rendezvous
    arrival: Arrival
    store: Any
    """A TCPStore; torch's type stubs lack its `clone`."""
    watch: HeartbeatThread | None = None

    def get_backend(self) -> str:
        """Return the name under which torch elastic knows this handler."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Join, wait for the other nodes, and return this node's rank in the plan's order.

        Raises RunFailed if the others do not come, and BadInput if they run different work.
        """
        with nothing_to_finish():
            return self._meet(super().next_rendezvous)

    def _meet(self, meet: Callable[[], RendezvousInfo]) -> RendezvousInfo:
        place = self.rendezvous
        call_in_thread(self._announce)
        began, store = time.time(), self.store.clone()
        try:
            with waiting_messages(lambda: _waiting_note(place, began, store, self.arrival.node_rank is not None)):
                met = call_in_thread(meet)
            arrivals = call_in_thread(lambda: _exchange(met.store, met.rank, met.world_size, self.arrival, place.token))
        except RendezvousTimeoutError:
            raise RunFailed(_too_few(place, self.store.add("came", 0))) from None
        except (RendezvousError, DistError):
            raise RunFailed(_lost_message(place)) from None
        except BaseException:
            with contextlib.suppress(TimeoutError, DistError):  # the node that hosts the store may be gone
                call_in_thread(lambda: self.store.add("came", -1), _LEAVE_SECONDS)
            raise
        call_in_thread(lambda: self.store.set(_STATE, _HAS_MET))
        order = node_order(arrivals, some_are_lost=place.attempt > 0)
        if met.world_size > 1:
            hosts = [arrivals[order.index(node)].host for node in range(met.world_size)]
            self.watch = HeartbeatThread(Heartbeat(met.store, order[met.rank], hosts))
        bootstrap = met.bootstrap_store_info
        assert bootstrap is not None, "nodes that have met share a store"
        return RendezvousInfo(met.store, order[met.rank], met.world_size, bootstrap)

    def _announce(self) -> None:
        """Count this node in the store, and enter its node rank if it has one."""
        self.store.add("came", 1)
        if self.arrival.node_rank is not None:
            self.store.set(f"here/{self.arrival.node_rank}", self.arrival.host)

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        """Host the store of the ranks on one address only; torch would listen on every network of the machine."""
        return _hosted_at(master_addr, master_port)

    def num_nodes_waiting(self) -> int:
        """Return 0, as no node may join later; the agent calls this while the ranks work.

        Raises RunFailed when a node is lost, or this one is cut off from the store.
        """
        if self.watch and self.watch.is_cut_off():
            raise RunFailed(_lost_message(self.rendezvous))
        if self.watch and self.watch.silent:
            raise RunFailed(
                f"no sign of life for {HEARTBEAT_TIMEOUT_SECONDS:.0f} s from {' and '.join(self.watch.silent)}; see "
                f"what "
                "happened there, then run again with --resume."
            )
        return 0

    def shutdown(self) -> bool:
        """Report to the other nodes that this one is done; not when it is cut off, since that would take minutes."""
        if self.watch:
            self.watch.end()
            if self.watch.is_cut_off():
                return False
        return super().shutdown()


class Heartbeat:
    """Heartbeats between the nodes: counters in the store that each node increments every few seconds."""

    def __init__(self, store: Store, node: int, hosts: Sequence[str]) -> None:
        self._store, self._node, self._hosts = store, node, hosts
        self._count = 0
        self._seen = {other: (b"", time.monotonic()) for other in range(len(hosts)) if other != node}

    def beat(self) -> list[str]:
        """Increment this node's counter; return the nodes whose counter has stopped, by number and host."""
        now = time.monotonic()
        self._count += 1
        self._store.set(f"pulse/{self._node}", str(self._count))
        for other, (before, _) in self._seen.items():
            key = f"pulse/{other}"
            count = self._store.get(key) if self._store.check([key]) else b""
            if count != before:
                self._seen[other] = (count, now)
        lost = [other for other, (_, since) in self._seen.items() if now - since > HEARTBEAT_TIMEOUT_SECONDS]
        return [f"node {other} ({self._hosts[other]})" for other in lost]


class HeartbeatThread:
    """The thread that sends and checks heartbeats; a store that is unreachable would block the caller for minutes."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.silent: list[str] = []
        self._heartbeat, self._answered, self._closed = heartbeat, time.monotonic(), threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(DistError):  # the store is gone
            while not self._closed.wait(HEARTBEAT_SECONDS):
                self.silent = self._heartbeat.beat()
                self._answered = time.monotonic()

    def is_cut_off(self) -> bool:
        """Return True if the store has not answered for too long."""
        return time.monotonic() - self._answered > HEARTBEAT_TIMEOUT_SECONDS

    def end(self) -> None:
        """Let the thread end before its next heartbeat."""
        self._closed.set()


def _exchange(store: Store, index: int, nodes: int, arrival: Arrival, token: str) -> list[Arrival]:
    """Return the arrivals of all nodes by their torch ranks. No node continues or leaves before all have read them."""
    seconds = _STORE_TIMEOUT.total_seconds()
    messages = synchronize(store, arrival.message(token).encode(), index, nodes, "arrival/", seconds)
    with contextlib.suppress(DistError):  # the node that hosts the store may be gone by now
        barrier(store, nodes, "arrivals are read", seconds)
    return [Arrival.parse(message, token) for message in messages]


def _waiting_note(place: Rendezvous, began: float, store: Any, have_ranks: bool) -> str:
    """Return the message of a node that waits for others."""
    missing = [node for node in range(place.nodes) if have_ranks and not store.check([f"here/{node}"])]
    return waiting_message(place, began, store.add("came", 0), missing)


def _too_few(place: Rendezvous, came: int) -> str:
    if came > place.nodes:
        return (
            f"{came} nodes joined at {place.endpoint}, where {place.nodes} were expected, and this one is one too "
            "many; give each run a port of its own."
        )
    return (
        f"{came} of {place.nodes} nodes joined at {place.endpoint} within {place.timeout_seconds:g} s; start "
        f"`meshwright run` on every node, with the same --rendezvous."
    )


def _lost_message(place: Rendezvous) -> str:
    return f"this node has lost the others that met at {place.endpoint}; see their output, then run again."


def _store_at(place: Rendezvous, timeout: float) -> Store:
    """Return the store at the endpoint, hosted by this process if it is the first on the endpoint's machine.

    Later attempts use the same store under a prefix of their own, if it still exists.
    """
    if not place.attempt:
        _stores[place.endpoint] = _new_store_at(place, timeout)
        return _stores[place.endpoint]
    try:
        _stores[place.endpoint].check(["any"])
    except (KeyError, DistError):
        _stores[place.endpoint] = _new_store_at(place, min(timeout, _STORE_TIMEOUT.total_seconds()))
    return PrefixStore(f"attempt-{place.attempt}", _stores[place.endpoint])


def _new_store_at(place: Rendezvous, timeout: float) -> TCPStore:
    if is_local_address(place.address):
        with contextlib.suppress(OSError):  # another node of this machine hosts it, or another program has the port
            store = _hosted_at(place.address, place.port)
            store.set(_STATE, _GATHERS)
            return store
    _wait_for_server(place, timeout)
    try:
        store, state = call_in_thread(lambda: _connected_to(place), _PROBE_SECONDS)
    except (RuntimeError, TimeoutError):  # torch raises the first if the answer is not a store's
        raise BadInput(
            f"--rendezvous {place.endpoint} is in use by another program; give a free port of that "
            "machine to all nodes."
        ) from None
    if state == _HAS_MET and not place.attempt:
        raise BadInput(
            f"--rendezvous {place.endpoint} is in use by another run, whose nodes are complete; give every run its own "
            "port."
        )
    store.set_timeout(_STORE_TIMEOUT)
    return store


def _connected_to(place: Rendezvous) -> tuple[TCPStore, str]:
    """Return the store that another process hosts, and its state."""
    limit = timedelta(seconds=_PROBE_SECONDS)
    store = TCPStore(place.address, place.port, is_master=False, timeout=limit, wait_for_workers=False)
    return store, store.get(_STATE).decode()


def _wait_for_server(place: Rendezvous, timeout: float) -> None:
    """Wait until something listens at the endpoint. Raises RunFailed if nothing does in time."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((place.address, place.port), timeout=_CONNECT_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"1 of {place.nodes} nodes came, this one: nothing answered at {place.endpoint} within "
                    f"{place.timeout_seconds:g} s ({error.strerror or error}); start `meshwright run` on that "
                    "machine, or correct --rendezvous."
                ) from None
        time.sleep(_RETRY_SECONDS)


def _hosted_at(address: str, port: int) -> TCPStore:
    """Return a store that this process hosts, listening on this one address of the machine."""
    server = listening_socket(address, port)
    bound_port = server.getsockname()[1]
    return TCPStore(
        address,
        bound_port,
        is_master=True,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=server.detach(),
    )


def _create(params: RendezvousParameters) -> NodeRendezvousHandler:
    place: Rendezvous = params.config["rendezvous"]
    timeout = timedelta(seconds=place.timeout_seconds)
    began, arrival = time.time(), params.config["arrival"]
    with nothing_to_finish(), waiting_messages(lambda: waiting_message(place, began, 1, ())):
        store = _store_at(place, place.timeout_seconds)
    handler = NodeRendezvousHandler.from_backend(
        run_id=params.run_id,
        store=store,
        backend=C10dRendezvousBackend(store, params.run_id),
        min_nodes=1 if place.attempt else place.nodes,
        max_nodes=place.nodes,
        local_addr=route_address(place.address),
        timeout=RendezvousTimeout(join=timeout, last_call=_LAST_CALL),
    )
    assert isinstance(handler, NodeRendezvousHandler)
    handler.rendezvous, handler.arrival, handler.store = place, arrival, store
    return handler


rendezvous_handler_registry.register(BACKEND, _create)
