"""The nodes of a run come together over torch elastic's c10d rendezvous.

Beyond what torch does, nodes say who they are and are put in the plan's order, a node that waits in vain learns how
many came, and one that falls silent later ends the run on the others.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

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

from meshwright.profiles.errors import BadInput, RunFailed
from meshwright.runtime.launch.aside import aside
from meshwright.runtime.launch.interruption import nothing_to_finish
from meshwright.runtime.launch.rendezvous import (
    Arrival,
    Rendezvous,
    address_towards,
    is_here,
    listening,
    node_order,
)
from meshwright.runtime.launch.wait_notes import note_of, notes_on_standard_error

BACKEND = "meshwright"

_ANSWER = timedelta(seconds=60)
"""A store that takes longer to answer is lost."""
PULSE_SECONDS = 5.0
"""Between two signs of life of a node."""
_LAST_CALL = timedelta(seconds=20)
"""Those who meet again wait so long for each one that is missing."""
_FAREWELL_SECONDS, _CONNECT_SECONDS, _PAUSE_SECONDS = 1.0, 2.0, 0.2
_STRANGER_SECONDS = 15.0
"""What answers no sooner at a port is no store."""
_STATE, _GATHERS, _HAS_MET = "state of meshwright", "gathers", "has met"
"""In the store, so that it is known from any other: whether its nodes still come."""
_kept: dict[str, TCPStore] = {}
"""By meeting point: whoever keeps the store keeps it for as long as it lives."""
SILENCE_SECONDS = 40.0
"""Without a sign of life a node is lost after this; one that computes is never silent, for its pulse has a thread.
Sooner than a rank may be late, who can only say that it waits: see `planner.program.deadlines`."""


class Gathering(DynamicRendezvousHandler):
    """One node's part in it. Made by torch elastic, once per agent."""

    rendezvous: Rendezvous
    arrival: Arrival
    store: Any
    """A TCPStore, whose clone torch's types do not know."""
    watch: Watch | None = None

    def get_backend(self) -> str:
        """The name that torch elastic knows it by."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Comes, waits for the others, and takes this node's place in the plan's order.

        Raises RunFailed when the others do not come, and BadInput when they do not belong together.
        """
        with nothing_to_finish():
            return self._met(super().next_rendezvous)

    def _met(self, meet: Callable[[], RendezvousInfo]) -> RendezvousInfo:
        place = self.rendezvous
        aside(self._come)
        began, store = time.time(), self.store.clone()
        try:
            with notes_on_standard_error(lambda: _note(place, began, store, self.arrival.node_rank is not None)):
                found = aside(meet)
            arrivals = aside(lambda: _exchange(found.store, found.rank, found.world_size, self.arrival, place.token))
        except RendezvousTimeoutError:
            raise RunFailed(_too_few(place, self.store.add("came", 0))) from None
        except (RendezvousError, DistError):
            raise RunFailed(_have_left(place)) from None
        except BaseException:
            with contextlib.suppress(TimeoutError, DistError):  # who keeps the store may be away
                aside(lambda: self.store.add("came", -1), _FAREWELL_SECONDS)
            raise
        aside(lambda: self.store.set(_STATE, _HAS_MET))
        order = node_order(arrivals, some_are_lost=place.attempt > 0)
        if found.world_size > 1:
            hosts = [arrivals[order.index(node)].host for node in range(found.world_size)]
            self.watch = Watch(Pulse(found.store, order[found.rank], hosts))
        meeting = found.bootstrap_store_info
        assert meeting is not None, "nodes that have met share a store"
        return RendezvousInfo(found.store, order[found.rank], found.world_size, meeting)

    def _come(self) -> None:
        """Says that this node is here."""
        self.store.add("came", 1)
        if self.arrival.node_rank is not None:
            self.store.set(f"here/{self.arrival.node_rank}", self.arrival.host)

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        """Where the ranks meet that the nodes start; torch would have it listen on every network of the machine."""
        return _kept_at(master_addr, master_port)

    def num_nodes_waiting(self) -> int:
        """Asked by the agent while the ranks work; no node may join later. Raises RunFailed when one falls silent."""
        if self.watch and self.watch.is_cut_off():
            raise RunFailed(_have_left(self.rendezvous))
        if self.watch and self.watch.silent:
            raise RunFailed(
                f"no sign of life for {SILENCE_SECONDS:.0f} s from {' and '.join(self.watch.silent)}; see what "
                "happened there, then run again with --resume."
            )
        return 0

    def shutdown(self) -> bool:
        """Tells the others that this node is done, unless it is cut off from them, when that would take minutes."""
        if self.watch:
            self.watch.end()
            if self.watch.is_cut_off():
                return False
        return super().shutdown()


class Pulse:
    """Signs of life between the nodes, by a count that each raises every few seconds."""

    def __init__(self, store: Store, node: int, hosts: Sequence[str]) -> None:
        self._store, self._node, self._hosts = store, node, hosts
        self._count = 0
        self._seen = {other: (b"", time.monotonic()) for other in range(len(hosts)) if other != node}

    def beat(self) -> list[str]:
        """Gives a sign of life; the nodes whose count has not moved for too long, by number and host."""
        now = time.monotonic()
        self._count += 1
        self._store.set(f"pulse/{self._node}", str(self._count))
        for other, (before, _) in self._seen.items():
            key = f"pulse/{other}"
            count = self._store.get(key) if self._store.check([key]) else b""
            if count != before:
                self._seen[other] = (count, now)
        lost = [other for other, (_, since) in self._seen.items() if now - since > SILENCE_SECONDS]
        return [f"node {other} ({self._hosts[other]})" for other in lost]


class Watch:
    """Keeps a pulse in a thread of its own, for a store behind a cut cable answers nothing for minutes."""

    def __init__(self, pulse: Pulse) -> None:
        self.silent: list[str] = []
        self._pulse, self._answered, self._over = pulse, time.monotonic(), threading.Event()
        threading.Thread(target=self._keep, daemon=True).start()

    def _keep(self) -> None:
        with contextlib.suppress(DistError):  # a store that is gone answers nothing any more
            while not self._over.wait(PULSE_SECONDS):
                self.silent = self._pulse.beat()
                self._answered = time.monotonic()

    def is_cut_off(self) -> bool:
        """Whether the store has answered nothing for too long."""
        return time.monotonic() - self._answered > SILENCE_SECONDS

    def end(self) -> None:
        """Lets the thread end at its next beat."""
        self._over.set()


def _exchange(store: Store, index: int, nodes: int, arrival: Arrival, token: str) -> list[Arrival]:
    """What every node said, by torch's number for it. No node goes on, or away, before all have read."""
    store.set(f"arrival/{index}", arrival.message(token))
    said = [store.get(f"arrival/{number}") for number in range(nodes)]
    if store.add("read", 1) == nodes:
        store.set("all read", "")
    with contextlib.suppress(DistError):  # who keeps the store may be away by now
        store.wait(["all read"], _ANSWER)
    return [Arrival.parse(message, token) for message in said]


def _note(place: Rendezvous, began: float, store: Any, have_ranks: bool) -> str:
    """What a node says that waits for others."""
    missing = [node for node in range(place.nodes) if have_ranks and not store.check([f"here/{node}"])]
    return note_of(place, began, store.add("came", 0), missing)


def _too_few(place: Rendezvous, came: int) -> str:
    if came > place.nodes:
        return (
            f"{came} nodes came to {place.endpoint}, where {place.nodes} were expected, and this one is one too many; "
            "give each run a port of its own."
        )
    return (
        f"{came} of {place.nodes} nodes came to {place.endpoint} within {place.patience_seconds:g} s; start "
        f"`meshwright run` on every node, with the same --rendezvous."
    )


def _have_left(place: Rendezvous) -> str:
    return (
        f"the nodes that met at {place.endpoint} have parted, and this one is left; see what the others say, then run "
        "again."
    )


def _store_at(place: Rendezvous, patience: float) -> Store:
    """The store at the meeting point, kept by this process if it is the first on the machine that is meant. Those who
    meet again meet in the same one if it is still there, in a part of its own."""
    if not place.attempt:
        _kept[place.endpoint] = _new_store_at(place, patience)
        return _kept[place.endpoint]
    try:
        _kept[place.endpoint].check(["any"])
    except (KeyError, DistError):
        _kept[place.endpoint] = _new_store_at(place, min(patience, _ANSWER.total_seconds()))
    return PrefixStore(f"attempt-{place.attempt}", _kept[place.endpoint])


def _new_store_at(place: Rendezvous, patience: float) -> TCPStore:
    if is_here(place.address):
        with contextlib.suppress(OSError):  # another node of this machine keeps it, or another program
            store = _kept_at(place.address, place.port)
            store.set(_STATE, _GATHERS)
            return store
    _reach(place, patience)
    try:
        store, found = aside(lambda: _found_at(place), _STRANGER_SECONDS)
    except (RuntimeError, TimeoutError):  # torch raises the first for what it is answered
        raise BadInput(
            f"--rendezvous {place.endpoint} is held by another program, where no run meets; give a free port of that "
            "machine to all nodes."
        ) from None
    if found == _HAS_MET and not place.attempt:
        raise BadInput(
            f"--rendezvous {place.endpoint} is held by a run whose nodes have all come; give every run its own port."
        )
    store.set_timeout(_ANSWER)
    return store


def _found_at(place: Rendezvous) -> tuple[TCPStore, str]:
    """The store that another process keeps, and whether its nodes still come."""
    limit = timedelta(seconds=_STRANGER_SECONDS)
    store = TCPStore(place.address, place.port, is_master=False, timeout=limit, wait_for_workers=False)
    return store, store.get(_STATE).decode()


def _reach(place: Rendezvous, patience: float) -> None:
    """Waits until something listens at the meeting point. Raises RunFailed where nothing does in time."""
    until = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((place.address, place.port), timeout=_CONNECT_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise RunFailed(
                    f"1 of {place.nodes} nodes came, this one, for nobody answered at {place.endpoint} within "
                    f"{place.patience_seconds:g} s ({error.strerror or error}); start `meshwright run` on that "
                    "machine, or correct --rendezvous."
                ) from None
        time.sleep(_PAUSE_SECONDS)


def _kept_at(address: str, port: int) -> TCPStore:
    """A store that this process keeps, and that only this address of the machine leads to."""
    held = listening(address, port)
    taken = held.getsockname()[1]
    return TCPStore(
        address, taken, is_master=True, timeout=_ANSWER, wait_for_workers=False, master_listen_fd=held.detach()
    )


def _create(params: RendezvousParameters) -> Gathering:
    place: Rendezvous = params.config["rendezvous"]
    patience = timedelta(seconds=place.patience_seconds)
    began, arrival = time.time(), params.config["arrival"]
    with nothing_to_finish(), notes_on_standard_error(lambda: note_of(place, began, 1, ())):
        store = _store_at(place, place.patience_seconds)
    handler = Gathering.from_backend(
        run_id=params.run_id,
        store=store,
        backend=C10dRendezvousBackend(store, params.run_id),
        min_nodes=1 if place.attempt else place.nodes,
        max_nodes=place.nodes,
        local_addr=address_towards(place.address),
        timeout=RendezvousTimeout(join=patience, last_call=_LAST_CALL),
    )
    assert isinstance(handler, Gathering)
    handler.rendezvous, handler.arrival, handler.store = place, arrival, store
    return handler


rendezvous_handler_registry.register(BACKEND, _create)
