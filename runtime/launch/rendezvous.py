"""The rendezvous of a run's machines, the order of the nodes, and the secret token with which they authenticate.

Nodes are ordered by node rank if every node gives one, else as torch elastic orders them: by their addresses as text.
The ranks of a node are consecutive either way: node n has ranks n * ranks_per_node to (n + 1) * ranks_per_node - 1.

The seal of a message is the HMAC-SHA256 (RFC 2104) of its text under the token, which itself is never sent.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self

import psutil

from meshwright.profiles.errors import BadInput
from meshwright.profiles.untrusted_text import read_text, whole_number

TOKEN_VARIABLE = "MESHWRIGHT_TOKEN"
"""Environment variable that holds the token if no file is named."""
_MIN_CHARACTERS, _MAX_BYTES = 16, 4096
_HINT = "`openssl rand -hex 16` makes one"


def read_token(path: Path | None, environment: Mapping[str, str] = os.environ) -> str:
    """Return the token in a file, else that of the environment; empty if there is neither.

    Raises BadInput for a file that others may read, and for a token that is too short.
    """
    if path is None:
        source, token = TOKEN_VARIABLE, environment.get(TOKEN_VARIABLE, "")
        if not token:
            return ""
    else:
        source, token = f"--token-file {path}", read_text(path, "token", _MAX_BYTES).strip()
        if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            raise BadInput(f"{source} can be read by others; make it yours alone: chmod 600 {path}.")
    if len(token) < _MIN_CHARACTERS:
        raise BadInput(f"{source} has {len(token)} characters, fewer than {_MIN_CHARACTERS}; {_HINT}.")
    return token


def seal(text: str, token: str) -> str:
    """Return the text with its seal, as JSON."""
    return json.dumps({"text": text, "seal": _seal(text, token)})


def open_sealed(message: str | bytes, token: str) -> str | None:
    """Return the text of a message that was sealed with the same token, else None; compared in constant time."""
    try:
        content = json.loads(message)
        text, seal = str(content["text"]), str(content["seal"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return text if hmac.compare_digest(seal.encode(), _seal(text, token).encode()) else None


def _seal(text: str, token: str) -> str:
    return hmac.new(token.encode(), text.encode(), "sha256").hexdigest()


_BACKLOG = 1024

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def is_launched_rank(environment: Mapping[str, str]) -> bool:
    """Return True if torchrun, or another launcher, has started this process as a rank."""
    return all(name in environment for name in _RANK_VARIABLES)


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The address at which the nodes of a run meet. Port 0 picks a free port, which works for a single node only."""

    nodes: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    node_rank: int | None = None
    timeout_seconds: float = 600.0
    """Seconds that a node waits for the others."""
    attempt: int = 0
    """Number of earlier attempts of this run; if above 0, nodes that do not return count as lost."""
    token: str = field(default="", repr=False)
    """The run's secret token; empty for a trusted network."""

    @classmethod
    def parse(cls, text: str, nodes: int, node_rank: int | None = None, token: str = "") -> Rendezvous:
        """Parse host:port, or [address]:port for IPv6. Raises BadInput for anything else."""
        host, _, port = text.rpartition(":")
        number = whole_number(port)
        is_bracketed = host.startswith("[") and host.endswith("]")
        address = host[1:-1] if is_bracketed else host
        if not address or number is None or number > 65535 or is_bracketed != (":" in address):
            raise BadInput(f"--rendezvous {text!r} is not host:port; write it like 10.0.0.1:29500, or [fd00::1]:29500.")
        return cls(nodes=nodes, address=address, port=number, node_rank=node_rank, token=token)

    def next_attempt(self, nodes: int) -> Rendezvous:
        """Return the rendezvous for the next attempt of the same run, with up to `nodes` nodes."""
        return replace(self, nodes=nodes, attempt=self.attempt + 1)

    @property
    def endpoint(self) -> str:
        """The address and port in the form that `parse` reads."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    @property
    def is_default(self) -> bool:
        """True for a single node without a --rendezvous option."""
        return self.nodes == 1 and self.port == 0

    def check(self) -> None:
        """Raises BadInput for an unreachable host, several nodes without a port, and a single node's port in use.

        With several nodes the port may be in use by the first of them, or by this one from an earlier attempt.
        """
        if self.attempt:
            return
        if self.is_default:
            _require_loopback(self.address)
        own_address = route_address(self.address)  # raises BadInput for an unreachable host
        if self.nodes > 1 and self.port == 0:
            raise BadInput(
                f"--rendezvous {self.endpoint}: {self.nodes} nodes cannot meet at a port that each picks for itself; "
                "give one of the machines and a free port of it, like 10.0.0.1:29500."
            )
        if self.nodes > 1 or self.port == 0:
            return
        try:
            listening_socket(self.address, self.port).close()
        except OSError as error:
            hint = (
                "give another port"
                if is_local_address(self.address)
                else f"give this machine's {own_address}, or another"
            )
            raise BadInput(f"--rendezvous {self.endpoint} cannot be used ({error.strerror}); {hint}.") from None


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """The message that a node sends when it joins the rendezvous."""

    host: str
    node_rank: int | None
    num_ranks: int
    work: str
    """A digest of the node's plan, job and options."""

    @classmethod
    def here(cls, *, node_rank: int | None, num_ranks: int, work: str) -> Self:
        """Return the arrival of this machine, under its host name."""
        return cls(host=socket.gethostname(), node_rank=node_rank, num_ranks=num_ranks, work=work)

    def message(self, token: str) -> str:
        """Return the arrival as JSON sealed with the token, for the rendezvous store."""
        return seal(json.dumps(asdict(self)), token)

    @classmethod
    def parse(cls, message: str | bytes, token: str) -> Self:
        """Parse what another node wrote with `message`. Raises BadInput if it was sealed with another token."""
        text = open_sealed(message, token)
        if text is None:
            raise BadInput(
                "a node came with another token, or one of the nodes has none; give every node of the run the same, in "
                "MESHWRIGHT_TOKEN or with --token-file."
            )
        return cls(**json.loads(text))


def node_order(arrivals: Sequence[Arrival], *, some_are_lost: bool = False) -> tuple[int, ...]:
    """Return the plan's node number of each arrival; with `some_are_lost` the remaining ones keep their order.

    Raises BadInput if the nodes run different work, start different numbers of ranks, or give node ranks that are not
    0 to n - 1, once each.
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
    node_ranks = [arrival.node_rank for arrival in arrivals]
    numbers = [number for number in node_ranks if number is not None]
    if not numbers:
        return tuple(range(len(arrivals)))
    if some_are_lost and len(set(numbers)) == len(arrivals):
        return tuple(sorted(numbers).index(number) for number in numbers)
    if sorted(numbers) != list(range(len(arrivals))):
        by_host = ", ".join(f"{a.host} {'none' if a.node_rank is None else a.node_rank}" for a in arrivals)
        raise BadInput(
            f"the nodes' --node-rank are {by_host}; give each of 0 to {len(arrivals) - 1} once, or none to any node."
        )
    return tuple(numbers)


def route_address(host: str) -> str:
    """Return the address of this machine on the route to `host`. Raises BadInput if there is no route."""
    try:
        family, kind, _, _, address_info = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address_info)  # sends nothing: the system only looks up the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise BadInput(
            f"--rendezvous {host} cannot be reached ({error.strerror}); give a name or an address that this machine "
            "has a route to."
        ) from None


def _require_loopback(address: str) -> None:
    try:
        listening_socket(address, 0).close()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
    except OSError as error:
        raise BadInput(
            f"the ranks of this machine meet at {address}, which cannot be used ({error.strerror}); bring its loopback "
            "up: ip link set lo up."
        ) from None


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on this one address of the machine. Raises OSError if the port is in use."""
    family, kind, _, _, address_info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    server = socket.socket(family, kind)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address_info)
        server.listen(_BACKLOG)
    except OSError:
        server.close()
        raise
    return server


def is_local_address(host: str) -> bool:
    """Return True if `host` is an address of this machine."""
    family, kind, _, _, address_info = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        try:
            probe.bind(address_info)
        except OSError:
            return False
    return True


def interface_of(address: str) -> str | None:
    """Return the network interface with this address; None if there is none."""
    interfaces = psutil.net_if_addrs()
    return next((name for name, items in interfaces.items() if address in {item.address for item in items}), None)
