"""Transport: messages arrive in order, within a process and between processes, whoever else lives there."""

from __future__ import annotations

import threading
import time
import weakref
from typing import cast

import pytest
import torch
import torch.distributed as dist

from meshwright.runtime.messages.transport import ProcessRanks, Transport
from tests.runtime.ranks import run_on_ranks

NO_GROUP = cast(dist.ProcessGroup, None)


def message(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_messages_within_a_process_arrive_in_order_by_sender_and_channel() -> None:
    held = ProcessRanks(3)
    zero, one, two = (Transport(NO_GROUP, rank=rank, process=held) for rank in range(3))
    zero.send(message(1), 2, channel=0)
    one.send(message(2, 2), 2, channel=0)
    zero.send(message(3), 2, channel=1)
    zero.send(message(4), 2, channel=0)
    assert two.receive(1, 0).tolist() == [2, 2]
    assert [two.receive(0, 0).tolist(), two.receive(0, 0).tolist()] == [[1], [4]]
    assert two.receive(0, 1).tolist() == [3]


def exchange_between_processes() -> dict[int, list[list[int]]]:
    """Four ranks, two to a process: everyone writes to everyone else, and reads in another order."""
    held, process = ProcessRanks(2), dist.get_rank()
    assert dist.group.WORLD is not None
    mine = {rank: Transport(dist.group.WORLD, rank=rank, process=held) for rank in (2 * process, 2 * process + 1)}
    for rank, transport in mine.items():
        for other in set(range(4)) - {rank}:
            transport.send(message(rank, other), other, channel=5)
    received = {
        rank: [transport.receive(other, 5).tolist() for other in (3, 2, 1, 0) if other != rank]
        for rank, transport in mine.items()
    }
    for transport in mine.values():
        transport.flush()
    return received


LENGTHS = (0, 1, 32_759, 32_760, 32_761, 100_000)


def expected_and_not() -> list[bool]:
    """Rank 0 writes messages of all lengths; rank 1 makes room for some of them before they are sent."""
    assert dist.group.WORLD is not None
    transport = Transport(dist.group.WORLD)
    messages = [torch.arange(length).to(torch.uint8) for length in LENGTHS]
    if dist.get_rank() == 1:
        for _ in range(3):
            transport.post_receive(0, 0)
    dist.barrier()
    if dist.get_rank() == 0:
        for sent in messages:
            transport.send(sent, 1, channel=0)
        transport.flush()
        return []
    return [torch.equal(transport.receive(0, 0), sent) for sent in messages]


def arrives_while_its_receiver_computes() -> bool:
    """Whether a message that room was made for has left its sender before it is asked for."""
    assert dist.group.WORLD is not None
    transport = Transport(dist.group.WORLD)
    if dist.get_rank() == 1:
        transport.post_receive(0, 0)
        dist.barrier()
        return transport.receive(0, 0).tolist() == [7]
    transport.send(message(7), 1, channel=0)
    leaving = threading.Thread(target=transport.flush)
    leaving.start()
    leaving.join(timeout=30)
    has_left = not leaving.is_alive()
    dist.barrier()
    leaving.join()
    return has_left


@pytest.mark.slow
def test_messages_of_every_length_arrive_as_they_were_expected_or_not() -> None:
    assert run_on_ranks(2, expected_and_not) == [[], [True] * len(LENGTHS)]


@pytest.mark.slow
def test_a_message_that_is_expected_arrives_before_it_is_asked_for() -> None:
    assert run_on_ranks(2, arrives_while_its_receiver_computes) == [True, True]


@pytest.mark.slow
def test_messages_between_processes_find_the_rank_they_were_sent_to() -> None:
    for received in run_on_ranks(2, exchange_between_processes):
        for rank, messages in received.items():
            assert messages == [[other, rank] for other in (3, 2, 1, 0) if other != rank]


def is_let_go() -> bool:
    """Rank 0 writes to rank 1; whether the message is gone from its memory some time after it was read."""
    assert dist.group.WORLD is not None
    transport = Transport(dist.group.WORLD)
    if dist.get_rank() == 1:
        return transport.receive(0, 0).tolist() == [7]
    sent = message(7)
    watched = weakref.ref(sent)
    transport.send(sent, 1, channel=0)
    del sent
    deadline = time.monotonic() + 30
    while watched() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    transport.flush()
    return watched() is None


@pytest.mark.slow
def test_a_message_that_was_read_is_not_kept_by_its_sender() -> None:
    assert run_on_ranks(2, is_let_go) == [True, True]
