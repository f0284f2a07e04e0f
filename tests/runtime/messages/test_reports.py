"""Reports: rank 0 takes the outcomes of a turn together, the oldest turn first, and no rank waits for it."""

from __future__ import annotations

from typing import cast

import pytest
import torch.distributed as dist

from meshwright.runtime.messages.transport import ProcessRanks, Reports, Transport
from meshwright.runtime.records.results import PeriodResult

NUM_RANKS = 3


@pytest.fixture
def reports() -> list[Reports]:
    """Of three ranks in one process, whose messages do not leave it."""
    process, nobody = ProcessRanks(NUM_RANKS), cast(dist.ProcessGroup, None)
    transports = (Transport(nobody, rank=rank, process=process) for rank in range(NUM_RANKS))
    return [Reports(transport, num_ranks=NUM_RANKS) for transport in transports]


def outcome(turn: int, rank: int) -> PeriodResult:
    return PeriodResult(period=turn, spans=(), overhead=0.5, metrics={"actor_train": {"rank": float(rank)}})


def test_a_turn_is_taken_whole_and_in_the_order_of_ranks_whoever_told_first(reports: list[Reports]) -> None:
    for turn in range(2):
        for rank in (2, 0, 1):
            reports[rank].send(outcome(turn, rank))
    for turn in range(2):
        assert reports[0].take() == tuple(outcome(turn, rank) for rank in range(NUM_RANKS))
    assert reports[0].take() == ()


def test_turns_that_may_still_be_under_way_are_left(reports: list[Reports]) -> None:
    taken = []
    for turn in range(4):
        for rank in (1, 2) if turn < 2 else ():
            reports[rank].send(outcome(turn, rank))
        reports[0].send(outcome(turn, 0))
        taken.append([one.period for one in reports[0].take(leave=2)])
    assert taken == [[], [], [0, 0, 0], [1, 1, 1]]
