"""Work that is shared by two processes finds what one would."""

from __future__ import annotations

import os
import threading
import time

import pytest

from meshwright.planner.side_by_side import side_by_side

forks = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two processors of Linux"
)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 40])
def test_what_is_found_is_in_the_order_of_the_items(count: int) -> None:
    assert side_by_side(lambda item: f"{item}" * 9000, range(count)) == [f"{item}" * 9000 for item in range(count)]


@forks
def test_two_processes_share_the_work() -> None:
    def work(_item: int) -> int:
        time.sleep(0.05)
        return os.getpid()

    assert len(set(side_by_side(work, range(6)))) == 2


def test_what_the_second_process_fails_at_is_done_by_the_first() -> None:
    first = os.getpid()

    def work(item: int) -> int:
        time.sleep(0.02)
        if os.getpid() != first:
            raise ValueError("only the first can")
        return item

    assert side_by_side(work, range(5)) == list(range(5))


def test_what_the_first_process_fails_at_is_raised() -> None:
    def work(item: int) -> int:
        raise ValueError(f"not {item}")

    with pytest.raises(ValueError, match="not"):
        side_by_side(work, range(3))
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_program_with_threads_does_not_fork() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert set(side_by_side(lambda _: os.getpid(), range(4))) == {os.getpid()}
    finally:
        done.set()
        thread.join()


@forks
def test_a_second_process_works_while_the_first_prepares() -> None:
    prepared = []

    def prepare() -> None:
        time.sleep(0.1)
        prepared.append(os.getpid())

    found = side_by_side(lambda _: os.getpid(), range(4), prepare=prepare)
    assert prepared == [os.getpid()]
    assert os.getpid() not in found
