"""Mail: letters arrive in order, within a process and between processes, whoever else lives there."""

from __future__ import annotations

import time
import weakref
from typing import cast

import pytest
import torch
import torch.distributed as dist

from meshwright.runtime.mail import House, Mail
from tests.runtime.ranks import run_on_ranks

NO_GROUP = cast(dist.ProcessGroup, None)


def letter(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_letters_within_a_house_arrive_in_order_by_sender_and_channel() -> None:
    house = House(3)
    zero, one, two = (Mail(NO_GROUP, rank=rank, house=house) for rank in range(3))
    zero.send(letter(1), 2, channel=0)
    one.send(letter(2, 2), 2, channel=0)
    zero.send(letter(3), 2, channel=1)
    zero.send(letter(4), 2, channel=0)
    assert two.receive(1, 0).tolist() == [2, 2]
    assert [two.receive(0, 0).tolist(), two.receive(0, 0).tolist()] == [[1], [4]]
    assert two.receive(0, 1).tolist() == [3]


def exchange_between_houses() -> dict[int, list[list[int]]]:
    """Four ranks, two to a process: everyone writes to everyone else, and reads in another order."""
    house, process = House(2), dist.get_rank()
    assert dist.group.WORLD is not None
    mine = {rank: Mail(dist.group.WORLD, rank=rank, house=house) for rank in (2 * process, 2 * process + 1)}
    for rank, mail in mine.items():
        for other in set(range(4)) - {rank}:
            mail.send(letter(rank, other), other, channel=5)
    received = {
        rank: [mail.receive(other, 5).tolist() for other in (3, 2, 1, 0) if other != rank]
        for rank, mail in mine.items()
    }
    for mail in mine.values():
        mail.flush()
    return received


@pytest.mark.slow
def test_letters_between_houses_find_the_rank_they_were_sent_to() -> None:
    for received in run_on_ranks(2, exchange_between_houses):
        for rank, letters in received.items():
            assert letters == [[other, rank] for other in (3, 2, 1, 0) if other != rank]


def is_let_go() -> bool:
    """Rank 0 writes to rank 1; whether the letter is gone from its memory some time after it was read."""
    assert dist.group.WORLD is not None
    mail = Mail(dist.group.WORLD)
    if dist.get_rank() == 1:
        return mail.receive(0, 0).tolist() == [7]
    sent = letter(7)
    watched = weakref.ref(sent)
    mail.send(sent, 1, channel=0)
    del sent
    deadline = time.monotonic() + 30
    while watched() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    mail.flush()
    return watched() is None


@pytest.mark.slow
def test_a_letter_that_was_read_is_not_kept_by_its_sender() -> None:
    assert run_on_ranks(2, is_let_go) == [True, True]
