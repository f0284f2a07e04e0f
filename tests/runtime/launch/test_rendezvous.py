"""Where nodes meet: what they are told apart by, and which of them is which node of the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch._C._distributed_c10d import HashStore

from meshwright.profiles.errors import BadInput, RunFailed
from meshwright.runtime.launch import gathering
from meshwright.runtime.launch.gathering import Pulse
from meshwright.runtime.launch.joining import Seat
from meshwright.runtime.launch.launch import MESSAGES_ONLY, launch
from meshwright.runtime.launch.rendezvous import Arrival, Rendezvous, address_towards, interface_of, is_here, node_order
from tests.runtime.hosts import free_port

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


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
        assert Arrival.parse(arrival.text()) == arrival


def test_this_machine_knows_its_own_addresses() -> None:
    assert is_here("127.0.0.1")
    assert not is_here("192.0.2.1")  # kept for documentation: nobody has it
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None


def test_a_host_that_has_no_address_is_refused() -> None:
    with pytest.raises(BadInput, match=r"--rendezvous no.such.host.invalid cannot be reached"):
        Rendezvous(nodes=2, address="no.such.host.invalid", port=1).check()


def test_several_nodes_need_a_port_that_all_know() -> None:
    with pytest.raises(BadInput, match=r"2 nodes cannot meet at a port .* like 10.0.0.1:29500"):
        Rendezvous(nodes=2).check()


def test_a_node_that_waits_in_vain_says_how_many_came() -> None:
    place = Rendezvous(nodes=3, port=free_port(), patience_seconds=1.0)
    with pytest.raises(RunFailed, match=rf"1 of 3 nodes came to {place.endpoint} within 1 s"):
        launch(print, num_ranks=1, rendezvous=place, preparation=MESSAGES_ONLY)


def test_a_node_that_finds_nobody_at_the_meeting_point_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "is_here", lambda _: False)
    place = Rendezvous(nodes=2, port=free_port(), patience_seconds=1.0)
    with pytest.raises(RunFailed, match=rf"1 of 2 nodes came, this one, for nobody answered at {place.endpoint}"):
        launch(print, num_ranks=1, rendezvous=place, preparation=MESSAGES_ONLY)


def test_a_node_is_silent_when_its_count_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    store, clock = HashStore(), [0.0]
    monkeypatch.setattr(gathering.time, "monotonic", lambda: clock[0])
    pulses = [Pulse(store, node, ["a", "b", "c"]) for node in range(3)]
    for clock[0] in range(0, 200, 20):
        assert [pulse.beat() for pulse in pulses] == [[], [], []]
    for clock[0] in range(200, 281, 20):  # the last beat of the third was at 180, heard at 200
        found = [pulse.beat() for pulse in pulses[:2]]
    assert found == [["node 2 (c)"], ["node 2 (c)"]]


def test_what_torchrun_says_is_a_seat_and_nothing_said_is_none() -> None:
    seat = Seat.of(TORCHRUN)
    assert seat == Seat(rank=3, local_rank=1, num_ranks=4, ranks_per_node=2, address="10.0.0.1")
    assert (seat.node, seat.num_nodes) == (1, 2)
    assert Seat.of({"RANK": "0"}) is None


def test_a_seat_that_the_plan_does_not_have_is_refused() -> None:
    seat = Seat.of(TORCHRUN)
    assert seat is not None
    seat.require(nodes=2, ranks_per_node=2)
    with pytest.raises(BadInput, match=r"2 of 4 ranks .* has 1 nodes of 4; use torchrun --nnodes 1 --nproc-per-node 4"):
        seat.require(nodes=1, ranks_per_node=4)
    with pytest.raises(BadInput, match="rank 2 was started as local rank 1 of 2; ranks of a node must be consecutive"):
        replace(seat, rank=2).require(nodes=2, ranks_per_node=2)
