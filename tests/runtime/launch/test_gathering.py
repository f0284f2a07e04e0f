"""Nodes come together: one that waits in vain says how many came, and one that falls silent is seen."""

from __future__ import annotations

import contextlib
import itertools
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed import DistError

from benchmarks.hosts import free_port
from meshwright.planner.program.durations import MIN_SECONDS
from meshwright.profiles.errors import BadInput, RunFailed
from meshwright.runtime.launch import rendezvous_handler
from meshwright.runtime.launch.launch import MESSAGES_ONLY, launch
from meshwright.runtime.launch.rendezvous import Arrival, Rendezvous
from meshwright.runtime.launch.rendezvous_handler import (
    HEARTBEAT_SECONDS,
    HEARTBEAT_TIMEOUT_SECONDS,
    Heartbeat,
    HeartbeatThread,
    _exchange,
    _hosted_at,
    _new_store_at,
    _too_few,
    _wait_for_server,
)
from tests.runtime.environment import hostile
from tests.seeds import cases

ROOT = Path(__file__).parents[3]


def test_a_node_that_waits_in_vain_says_how_many_came() -> None:
    place = Rendezvous(nodes=3, port=free_port(), timeout_seconds=1.0)
    with pytest.raises(RunFailed, match=rf"1 of 3 nodes joined at {place.endpoint} within 1 s"):
        launch(print, num_ranks=1, rendezvous=place, setup=MESSAGES_ONLY)


def test_a_node_that_finds_nobody_at_the_meeting_point_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_handler, "is_local_address", lambda _: False)
    place = Rendezvous(nodes=2, port=free_port(), timeout_seconds=1.0)
    with pytest.raises(RunFailed, match=rf"1 of 2 nodes came, this one: nothing answered at {place.endpoint}"):
        launch(print, num_ranks=1, rendezvous=place, setup=MESSAGES_ONLY)


@pytest.mark.parametrize("says", [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 400 Bad\r\n\r\n" * 100])
def test_a_port_that_another_program_holds_is_refused(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was waited for without end, through SIGTERM too."""
    monkeypatch.setattr(rendezvous_handler, "_PROBE_SECONDS", 1.0)
    with hostile.server(lambda: itertools.chain([says], iter(lambda: time.sleep(0.1) or b"", None))) as (url, _):
        place = Rendezvous(nodes=2, port=int(url.split(":")[2].partition("/")[0]), timeout_seconds=5.0)
        begun = time.monotonic()
        with pytest.raises(BadInput, match=f"{place.endpoint} is in use by another program"):
            launch(print, num_ranks=1, rendezvous=place, setup=MESSAGES_ONLY)
        assert time.monotonic() - begun < 8.0


def test_the_store_of_another_program_of_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_handler, "_PROBE_SECONDS", 1.0)
    other = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(BadInput, match="is in use by another program"):
        _new_store_at(Rendezvous(nodes=2, port=other.port), 5.0)


def test_the_store_of_a_run_whose_nodes_have_met_is_not_joined() -> None:
    place = Rendezvous(nodes=2, port=free_port())
    store = _new_store_at(place, 1.0)
    assert _new_store_at(place, 1.0).check(["state of meshwright"])
    store.set("state of meshwright", "has met")
    with pytest.raises(BadInput, match="is in use by another run, whose nodes are complete; give every run its"):
        _new_store_at(place, 1.0)
    assert _new_store_at(place.next_attempt(2), 1.0).port == store.port


@pytest.mark.slow
@cases("number", [signal.SIGTERM, signal.SIGINT], few=1, ids=lambda number: number.name)
@cases("where", ["is-elsewhere", "is-here", "another program"], few=1)
def test_a_node_that_waits_ends_within_two_seconds_of_a_signal(where: str, number: signal.Signals) -> None:
    with contextlib.ExitStack() as around:
        port = free_port()
        if where == "another program":
            silence = hostile.STREAMS["silence"]
            port = int(around.enter_context(hostile.server(silence))[0].split(":")[2].partition("/")[0])
        command = [sys.executable, "-m", "tests.runtime.launch.waiting_node", str(port), where]
        node = around.enter_context(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True))
        assert node.stderr is not None
        assert any("waiting at" in line for line in node.stderr)
        begun = time.monotonic()
        node.send_signal(number)
        assert node.wait(20.0) == 130
        assert time.monotonic() - begun < 2.0
        assert "step" not in node.stderr.read()


def test_nobody_is_waited_for_longer_than_was_said_and_the_reason_is_named() -> None:
    begun = time.monotonic()
    with pytest.raises(RunFailed, match=r"nothing answered at .* within 600 s \(Connection refused\)"):
        _wait_for_server(Rendezvous(nodes=2, port=free_port()), 0.5)
    assert time.monotonic() - begun < 3.0


def test_a_node_is_silent_when_its_count_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    store, clock = HashStore(), [0.0]
    monkeypatch.setattr(rendezvous_handler.time, "monotonic", lambda: clock[0])
    pulses = [Heartbeat(store, node, ["a", "b", "c"]) for node in range(3)]
    for clock[0] in range(0, 200, 20):
        assert [pulse.beat() for pulse in pulses] == [[], [], []]
    for clock[0] in range(200, 281, 20):  # the last beat of the third was at 180, heard at 200
        found = [pulse.beat() for pulse in pulses[:2]]
    assert found == [["node 2 (c)"], ["node 2 (c)"]]


def test_a_lost_node_is_named_before_a_rank_that_waits_for_it_is_late() -> None:
    """The node is told after it was silent for a beat more; 5 s are left for whoever asks and writes the sentence."""
    assert HEARTBEAT_TIMEOUT_SECONDS + 2 * HEARTBEAT_SECONDS + 5.0 <= MIN_SECONDS


def test_every_node_reads_what_all_have_said() -> None:
    store = HashStore()
    said = [Arrival(host=f"h{node}", node_rank=node, num_ranks=2, work="w") for node in range(3)]
    with ThreadPoolExecutor(3) as nodes:
        heard = list(nodes.map(lambda node: _exchange(store, node, 3, said[node], ""), range(3)))
    assert heard == [said] * 3


def test_a_node_that_comes_with_another_token_is_refused() -> None:
    store = HashStore()
    said = [Arrival(host=f"h{node}", node_rank=node, num_ranks=2, work="w") for node in range(2)]
    with ThreadPoolExecutor(2) as nodes, pytest.raises(BadInput, match="a node came with another token"):
        list(nodes.map(lambda node: _exchange(store, node, 2, said[node], f"token {node}"), range(2)))


def test_the_store_where_nodes_meet_listens_on_its_own_address_alone() -> None:
    kept = _hosted_at("127.0.0.1", free_port())
    kept.set("a", "b")
    for host, leads_there in (("127.0.0.1", True), ("127.0.0.2", False)):
        with socket.socket() as probe:
            assert (probe.connect_ex((host, kept.port)) == 0) is leads_there
    assert TCPStore("127.0.0.1", kept.port, is_master=False).get("a") == b"b"


def test_a_node_that_is_one_too_many_is_told_to_take_a_port_of_its_own() -> None:
    place = Rendezvous(nodes=2, port=29500)
    assert "3 nodes joined at 127.0.0.1:29500, where 2 were expected, and this one is one too many" in _too_few(
        place, 3
    )
    assert "1 of 2 nodes joined at 127.0.0.1:29500 within 600 s" in _too_few(place, 1)


class Quiet(Heartbeat):
    """A pulse whose store answers nothing more after its first beat."""

    is_gone = False

    def beat(self) -> list[str]:
        if self._count:
            self.is_gone = True
            raise DistError("the store is gone")
        return super().beat()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.perf_counter() + 30
    while not condition():
        assert time.perf_counter() < deadline
        time.sleep(0.01)


def test_a_node_whose_store_answers_nothing_more_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, store = [0.0], HashStore()
    monkeypatch.setattr(rendezvous_handler.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(rendezvous_handler, "HEARTBEAT_SECONDS", 0.01)
    gone, heard = Quiet(store, 1, ["a", "b"]), Heartbeat(store, 0, ["a", "b"])
    cut, alive = HeartbeatThread(gone), HeartbeatThread(heard)
    until(lambda: gone.is_gone and heard._seen[1][0] == b"1")
    assert not cut.is_cut_off()
    clock[0] = 1000.0
    assert cut.is_cut_off()
    until(lambda: not alive.is_cut_off())
    until(lambda: alive.silent == ["node 1 (b)"])
    alive.end()
