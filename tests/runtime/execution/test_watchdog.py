"""Who hangs is told from what all ranks do: the silent ones, else who is furthest behind and waits for nobody."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from meshwright.runtime.execution import watchdog
from meshwright.runtime.execution.watchdog import STACKS, RankActivity, Watchdog, hang_message

IN_RING = "all_reduce of ranks 0, 1, 2"


def doing(
    rank: int, place: int, waits: str = "sleep (x.py:1)", *, turn: int = 3, for_others: bool = False
) -> RankActivity:
    what = f"stage {place} of step {turn}"
    return RankActivity(
        rank=rank,
        period=turn,
        index=place,
        activity=what,
        seconds=70.4,
        location=waits,
        waits_for_others=for_others,
        host="far",
    )


def said(*ranks: RankActivity, silent: Sequence[int] = ()) -> str:
    return hang_message(ranks, [ranks[rank] for rank in silent], ranks[0], 60.0, Path("run/stacks"))


def test_who_waits_for_nobody_in_the_earliest_instruction_hangs() -> None:
    waits = doing(0, 4, IN_RING, for_others=True)
    assert said(waits, doing(1, 4), replace(waits, rank=2)) == (
        "rank 1 has been in stage 4 of step 3 for 70 s, at sleep (x.py:1); rank 0 waits in stage 4 of step 3, in "
        "all_reduce of ranks 0, 1, 2; an instruction may take 60 s; the stacks of the ranks that answer are in "
        "run/stacks: look there, then run again with --resume"
    )


def test_who_is_in_an_earlier_turn_or_instruction_is_behind() -> None:
    ahead = doing(0, 1, "receive with rank 1", turn=4, for_others=True)
    assert said(ahead, doing(1, 9)).startswith("rank 1 has been in stage 9 of step 3")
    assert said(ahead, doing(1, 0, turn=4)).startswith("rank 1 has been in stage 0 of step 4")


def test_where_all_wait_for_each_other_all_are_named() -> None:
    both = [doing(rank, 2, IN_RING, for_others=True) for rank in range(2)]
    assert said(*both).startswith(
        f"rank 0 has been in stage 2 of step 3 for 70 s, at {IN_RING}; rank 1 has been in stage 2 of step 3"
    )


def test_a_silent_rank_hangs_wherever_the_others_are() -> None:
    sentence = said(doing(0, 2, IN_RING, for_others=True), doing(1, 5), silent=[1])
    assert sentence.startswith("rank 1 has given no sign of life since stage 5 of step 3 (process ")
    assert "; rank 0 waits in stage 2 of step 3, in all_reduce" in sentence


def test_of_many_ranks_a_few_are_named() -> None:
    assert ", and 5 more ranks; " in said(*(doing(rank, 1) for rank in range(9)))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_BEAT_SECONDS", 0.05), ("_MIN_BEAT_SECONDS", 0.01), ("_DUMP_SECONDS", 0.5)):
        monkeypatch.setattr(watchdog, name, seconds)


@pytest.mark.usefixtures("quick")
def test_a_deadline_that_passes_is_told_once_with_all_stacks(tmp_path: Path) -> None:
    store, ends = dist.HashStore(), []
    dogs = [
        Watchdog(store, tmp_path, rank=rank, num_ranks=2, end=lambda sentence, silent: ends.append((sentence, silent)))
        for rank in range(2)
    ]
    with dogs[0].doing("stage a of step 0", 0, 0.3, 0), dogs[1].doing("stage a of step 0", 0, 60.0, 0):
        time.sleep(1.5)
    for dog in dogs:
        dog.close()
    [(sentence, silent)] = ends
    assert sentence.startswith("rank 0 has been in stage a of step 0 for ")
    assert silent == []
    for rank in range(2):
        stack = (tmp_path / STACKS / f"rank-{rank:05d}.txt").read_text()
        assert "test_a_deadline_that_passes_is_told_once_with_all_stacks" in stack


@pytest.mark.usefixtures("quick")
def test_what_ends_in_time_is_not_told_and_what_follows_may_take_as_long_as_it_likes(tmp_path: Path) -> None:
    ends: list[str] = []
    dog = Watchdog(dist.HashStore(), tmp_path, rank=0, num_ranks=1, end=lambda sentence, _: ends.append(sentence))
    for _ in range(3):
        with dog.doing("stage a of step 0", 0, 0.3, 0):
            time.sleep(0.15)
    time.sleep(0.6)
    dog.close()
    assert ends == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("waited_for", ["_BEAT_SECONDS", "_DUMP_SECONDS"])
@pytest.mark.usefixtures("quick")
def test_a_deadline_is_noticed_when_it_passes_and_ranks_that_have_answered_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waited_for: str
) -> None:
    monkeypatch.setattr(watchdog, waited_for, 30.0)
    ended = threading.Event()
    dog = Watchdog(dist.HashStore(), tmp_path, rank=0, num_ranks=1, end=lambda *_: ended.set())
    with dog.doing("stage a of step 0", 0, 0.3, 0):
        assert ended.wait(5.0)
    dog.close()


@pytest.mark.usefixtures("quick")
def test_a_rank_that_does_not_answer_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, ends = dist.HashStore(), []
    stopped = Watchdog(store, tmp_path, rank=1, num_ranks=2, end=lambda *_: None)
    stopped.close()
    dog = Watchdog(store, tmp_path, rank=0, num_ranks=2, end=lambda sentence, silent: ends.append((sentence, silent)))
    with dog.doing("stage a of step 0", 0, 0.3, 0):
        time.sleep(1.5)
    dog.close()
    [(sentence, silent)] = ends
    assert sentence.startswith(f"rank 1 has given no sign of life since starting (process {os.getpid()} of ")
    assert silent == [os.getpid()]
