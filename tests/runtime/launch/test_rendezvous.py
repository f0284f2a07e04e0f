"""Where nodes meet: what they are told apart by, and which of them is which node of the plan."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from meshwright.profiles.errors import BadInput
from meshwright.runtime.launch.rendezvous import (
    Arrival,
    Rendezvous,
    interface_of,
    is_local_address,
    listening_socket,
    node_order,
    route_address,
)


def arrivals(*node_ranks: int | None) -> list[Arrival]:
    return [Arrival(host=f"h{place}", node_rank=n, num_ranks=2, work="w") for place, n in enumerate(node_ranks)]


def test_a_nodes_place_is_its_node_rank_and_else_the_order_of_coming() -> None:
    assert node_order(arrivals(2, 0, 1)) == (2, 0, 1)
    assert node_order(arrivals(None, None)) == (0, 1)


@pytest.mark.parametrize("node_ranks", [(0, 0), (1, 2), (0, None)])
def test_node_ranks_that_do_not_count_the_nodes_are_refused_with_what_each_host_gave(
    node_ranks: tuple[int | None, ...],
) -> None:
    said = ", ".join(f"h{place} {'none' if n is None else n}" for place, n in enumerate(node_ranks))
    with pytest.raises(BadInput, match=f"the nodes' --node-rank are {said}; give each of 0 to 1 once"):
        node_order(arrivals(*node_ranks))


def test_nodes_with_other_ranks_or_other_work_are_refused() -> None:
    one, other = arrivals(0, 1)
    with pytest.raises(BadInput, match="h0 starts 2 ranks and h1 starts 4"):
        node_order([one, replace(other, num_ranks=4)])
    with pytest.raises(BadInput, match="h0 and h1 were given different plans, jobs or options"):
        node_order([one, replace(other, work="x")])


def test_an_arrival_is_the_same_after_a_message() -> None:
    for arrival in arrivals(None, 1):
        assert Arrival.parse(arrival.message("secret"), "secret") == arrival


@pytest.mark.parametrize("message", ["", "[]", "{", '{"text": "{}", "seal": ""}', "[" * 10_000])
def test_what_was_not_sealed_with_the_token_is_no_arrival(message: str) -> None:
    with pytest.raises(BadInput, match="a node came with another token, or one of the nodes has none; give every"):
        Arrival.parse(message, "secret")


def test_a_token_is_never_shown() -> None:
    assert "secret" not in repr(Rendezvous(token="secret"))
    assert "secret" not in arrivals(0)[0].message("secret")


def test_this_machine_knows_its_own_addresses() -> None:
    assert is_local_address("127.0.0.1")
    assert not is_local_address("192.0.2.1")  # kept for documentation: nobody has it
    assert route_address("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None


def test_a_host_that_has_no_address_is_refused() -> None:
    with pytest.raises(BadInput, match=r"--rendezvous no.such.host.invalid cannot be reached"):
        Rendezvous(nodes=2, address="no.such.host.invalid", port=1).check()


def test_several_nodes_need_a_port_that_all_know() -> None:
    with pytest.raises(BadInput, match=r"2 nodes cannot meet at a port .* like 10.0.0.1:29500"):
        Rendezvous(nodes=2).check()


@pytest.mark.parametrize(
    "text", ["localhost", "localhost:", ":29500", "localhost:99999", "localhost:port", "localhost:\u00b2"]
)
def test_a_rendezvous_is_host_and_port(text: str) -> None:
    with pytest.raises(BadInput, match="host:port"):
        Rendezvous.parse(text, nodes=1)


@pytest.mark.parametrize(
    ("text", "address", "endpoint"),
    [("[::1]:29500", "::1", "[::1]:29500"), ("[fd00::2]:0", "fd00::2", "[fd00::2]:0"), ("a:1", "a", "a:1")],
)
def test_an_address_of_ipv6_stands_in_brackets(text: str, address: str, endpoint: str) -> None:
    place = Rendezvous.parse(text, nodes=1)
    assert (place.address, place.endpoint) == (address, endpoint)
    for other in ("::1:29500", "[::1]", "[::1", "[a]:1", "[]:1"):
        with pytest.raises(BadInput, match=r"is not host:port; write it like .* or \[fd00::1\]:29500"):
            Rendezvous.parse(other, nodes=1)


def test_a_port_of_ipv6_in_use_is_refused() -> None:
    with listening_socket("::1", 0) as held:
        place = Rendezvous(address="::1", port=held.getsockname()[1])
        with pytest.raises(BadInput, match=rf"--rendezvous \[::1\]:{place.port} cannot be used .* give another port"):
            place.check()


def test_a_machine_without_a_loopback_is_told_so_and_not_of_an_option() -> None:
    check = "from meshwright.runtime.launch.rendezvous import Rendezvous; Rendezvous().check()"
    command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", check]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    if "unshare failed" in ended.stderr:
        pytest.skip("this machine has no namespaces for it")
    assert "bring its loopback up: ip link set lo up" in ended.stderr
    assert "--rendezvous" not in ended.stderr.splitlines()[-1]


def test_nodes_that_are_left_keep_their_order() -> None:
    left = [Arrival(host=host, node_rank=rank, num_ranks=2, work="w") for host, rank in (("c", 3), ("a", 0), ("b", 2))]
    assert node_order(left, some_are_lost=True) == (2, 0, 1)
    with pytest.raises(BadInput, match="give each of 0 to 2 once"):
        node_order(left)


def test_those_who_meet_again_need_no_free_port() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        first = Rendezvous(port=held.getsockname()[1])
        with pytest.raises(BadInput, match="cannot be used"):
            first.check()
        first.next_attempt(1).check()
    assert first.next_attempt(1).next_attempt(1).attempt == 2
