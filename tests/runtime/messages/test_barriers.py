"""Ranks that meet: nobody goes on before all have come, in one process or several."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from meshwright.runtime.messages.transport import Barriers
from tests.runtime.ranks import run_on_ranks

SETS = ((0, 1, 2, 3), (0, 1), (1, 2), (0, 1, 2, 3))
"""Of four ranks, two to a process; one set is named twice, and one lies in one process."""
ROUNDS = 3

Meeting = tuple[int, int, int, float, float]
"""The round, the place of the set, the rank, and when it came and went by the clock of the machine."""


def _meet() -> list[Meeting]:
    """What both ranks of this process do, each in its thread and late by a time of its own."""
    barriers, process = Barriers(SETS, 2), dist.get_rank()

    def follow(rank: int) -> list[Meeting]:
        found = []
        for number in range(ROUNDS):
            for place, ranks in enumerate(SETS):
                if rank in ranks:
                    time.sleep(0.02 * ((rank + number + place) % 4))
                    came = time.monotonic()
                    barriers.wait(ranks)
                    found.append((number, place, rank, came, time.monotonic()))
        return found

    with ThreadPoolExecutor(2) as threads:
        meetings = [meeting for of_rank in threads.map(follow, (2 * process, 2 * process + 1)) for meeting in of_rank]
    barriers.close()
    return meetings


def test_nobody_goes_on_before_the_last_has_come() -> None:
    meetings = [meeting for of_process in run_on_ranks(2, _meet) for meeting in of_process]
    for number in range(ROUNDS):
        for place, ranks in enumerate(SETS):
            met = [meeting for meeting in meetings if meeting[:2] == (number, place)]
            assert sorted(rank for _, _, rank, _, _ in met) == list(ranks)
            assert max(came for *_, came, _ in met) <= min(went for *_, went in met)


def _alone() -> bool:
    """Process 0 meets by itself, and process 1, which has no rank of that set, has nothing to do with it."""
    barriers = Barriers([(0, 1), (0,)], 2)
    if dist.get_rank() == 0:
        barriers.wait((0,))
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(barriers.wait, [(0, 1), (0, 1)]))
    barriers.close()
    return True


def test_ranks_of_one_process_meet_without_the_others() -> None:
    assert run_on_ranks(2, _alone) == [True, True]
