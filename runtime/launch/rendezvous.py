"""Where the machines of a run meet, and which of them is which node of the plan.

A node's place is its node rank where every node gives one, else the order in which torch elastic lists the nodes, which
is that of their addresses as text. The ranks of a node are consecutive either way: node n has ranks n * ranks_per_node
to (n + 1) * ranks_per_node - 1.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Self

import psutil

from meshwright.profiles.errors import BadInput
from meshwright.profiles.values import whole_number
from meshwright.runtime.launch.rendezvous_token import opened, sealed

_WAITING_CONNECTIONS = 1024

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def is_launched_rank(environment: Mapping[str, str]) -> bool:
    """Whether torchrun, or another launcher, has started this process as a rank."""
    return all(name in environment for name in _RANK_VARIABLES)


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the nodes of a run meet. Port 0 picks a free one, which only a single node can use."""

    nodes: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    node_rank: int | None = None
    patience_seconds: float = 600.0
    """How long a node waits for the others to come."""
    attempt: int = 0
    """Times that they have met before. Nodes that were there and do not come back are then lost."""
    token: str = field(default="", repr=False)
    """That nodes of the run know each other by; empty where the network is theirs alone."""

    @classmethod
    def parse(cls, text: str, nodes: int, node_rank: int | None = None, token: str = "") -> Rendezvous:
        """The rendezvous written as host:port, or [address]:port for one of IPv6. Raises BadInput for anything else."""
        host, _, port = text.rpartition(":")
        number = whole_number(port)
        is_bracketed = host.startswith("[") and host.endswith("]")
        address = host[1:-1] if is_bracketed else host
        if not address or number is None or number > 65535 or is_bracketed != (":" in address):
            raise BadInput(f"--rendezvous {text!r} is not host:port; write it like 10.0.0.1:29500, or [fd00::1]:29500.")
        return cls(nodes=nodes, address=address, port=number, node_rank=node_rank, token=token)

    def again(self, nodes: int) -> Rendezvous:
        """Where those meet again that have met here, as far as they are left of so many."""
        return replace(self, nodes=nodes, attempt=self.attempt + 1)

    @property
    def endpoint(self) -> str:
        """The address and the port as they are written."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    @property
    def is_own(self) -> bool:
        """Whether the ranks of a single node meet where no option has named a place."""
        return self.nodes == 1 and self.port == 0

    def check(self) -> None:
        """Raises BadInput for a host without a way to it, for no port, and when a single node's port is taken.

        With several nodes the port may be held by the first of them, and by this one where they have met before.
        """
        if self.attempt:
            return
        if self.is_own:
            _require_loopback(self.address)
        here = address_towards(self.address)
        if self.nodes > 1 and self.port == 0:
            raise BadInput(
                f"--rendezvous {self.endpoint}: {self.nodes} nodes cannot meet at a port that each picks for itself; "
                "give one of the machines and a free port of it, like 10.0.0.1:29500."
            )
        if self.nodes > 1 or self.port == 0:
            return
        try:
            listening(self.address, self.port).close()
        except OSError as error:
            way_out = "give another port" if is_here(self.address) else f"give this machine's {here}, or another"
            raise BadInput(f"--rendezvous {self.endpoint} cannot be used ({error.strerror}); {way_out}.") from None


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """What a node says of itself when it comes."""

    host: str
    node_rank: int | None
    num_ranks: int
    work: str
    """A digest of what the node is about to run."""

    @classmethod
    def here(cls, *, node_rank: int | None, num_ranks: int, work: str) -> Self:
        """That of this machine, by its own name."""
        return cls(host=socket.gethostname(), node_rank=node_rank, num_ranks=num_ranks, work=work)

    def message(self, token: str) -> str:
        """As JSON under the token's seal, for the store where nodes meet."""
        return sealed(json.dumps(asdict(self)), token)

    @classmethod
    def parse(cls, message: str | bytes, token: str) -> Self:
        """What another node wrote with `message`. Raises BadInput where it was sealed with another token."""
        text = opened(message, token)
        if text is None:
            raise BadInput(
                "a node came with another token, or one of the nodes has none; give every node of the run the same, in "
                "MESHWRIGHT_TOKEN or with --token-file."
            )
        return cls(**json.loads(text))


def node_order(arrivals: Sequence[Arrival], *, some_are_lost: bool = False) -> tuple[int, ...]:
    """The node of the plan that each arrival is; where some may be lost, the others keep their order.

    Raises BadInput where the nodes run different things, start different numbers of ranks, or do not number themselves
    from 0 on, once each.
    """
    first = arrivals[0]
    for other in arrivals[1:]:
        if other.num_ranks != first.num_ranks:
            raise BadInput(
                f"{first.host} starts {first.num_ranks} ranks and {other.host} starts {other.num_ranks}; every node of "
                "a plan has as many: give all of them the same plan."
            )
        if other.work != first.work:
            raise BadInput(
                f"{first.host} and {other.host} were given different plans, jobs or options; give every node the "
                "same, and each of two runs a port of its own."
            )
    given = [arrival.node_rank for arrival in arrivals]
    numbers = [number for number in given if number is not None]
    if not numbers:
        return tuple(range(len(arrivals)))
    if some_are_lost and len(set(numbers)) == len(arrivals):
        return tuple(sorted(numbers).index(number) for number in numbers)
    if sorted(numbers) != list(range(len(arrivals))):
        said = ", ".join(f"{a.host} {'none' if a.node_rank is None else a.node_rank}" for a in arrivals)
        raise BadInput(
            f"the nodes' --node-rank are {said}; give each of 0 to {len(arrivals) - 1} once, or none to any node."
        )
    return tuple(numbers)


def address_towards(host: str) -> str:
    """The address of this machine on the way to `host`. Raises BadInput where there is no way."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing: the system only looks up the way
            return str(probe.getsockname()[0])
    except OSError as error:
        raise BadInput(
            f"--rendezvous {host} cannot be reached ({error.strerror}); give a name or an address that this machine "
            "knows the way to."
        ) from None


def _require_loopback(address: str) -> None:
    try:
        listening(address, 0).close()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
    except OSError as error:
        raise BadInput(
            f"the ranks of this machine meet at {address}, which cannot be used ({error.strerror}); bring its loopback "
            "up: ip link set lo up."
        ) from None


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens on one address of this machine alone. Raises OSError where the port is taken."""
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(place)
        found.listen(_WAITING_CONNECTIONS)
    except OSError:
        found.close()
        raise
    return found


def is_here(host: str) -> bool:
    """Whether `host` is an address of this machine."""
    family, kind, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        try:
            probe.bind(place)
        except OSError:
            return False
    return True


def interface_of(address: str) -> str | None:
    """The network interface that has this address of the machine; None where none has."""
    interfaces = psutil.net_if_addrs()
    return next((name for name, held in interfaces.items() if address in {each.address for each in held}), None)
