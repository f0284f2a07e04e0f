"""Work that is shared by two processes finds what one would."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from meshwright.planner.search.parallel import map_in_processes, map_in_two_processes
from tests.planner.processes import at_work

ROOT = Path(__file__).parents[3]

forks = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two processors of Linux"
)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 40])
def test_what_is_found_is_in_the_order_of_the_items(count: int) -> None:
    assert map_in_two_processes(lambda item: f"{item}" * 9000, range(count)) == [
        f"{item}" * 9000 for item in range(count)
    ]


def alone(work: Callable[[], object]) -> str:
    """What the work prints in a process of its own, in which no other test has left a thread behind."""
    code = f"from {__name__} import {work.__name__} as work; print(work())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip()


def processes_of_six() -> int:
    def work(_item: int) -> int:
        time.sleep(0.05)
        return os.getpid()

    return len(set(map_in_two_processes(work, range(6))))


@forks
def test_two_processes_share_the_work() -> None:
    assert alone(processes_of_six) == "2"


def test_what_the_second_process_fails_at_is_done_by_the_first() -> None:
    first = os.getpid()

    def work(item: int) -> int:
        time.sleep(0.02)
        if os.getpid() != first:
            raise ValueError("only the first can")
        return item

    assert map_in_two_processes(work, range(5)) == list(range(5))


def test_what_the_first_process_fails_at_is_raised() -> None:
    def work(item: int) -> int:
        raise ValueError(f"not {item}")

    before = psutil.Process().children()
    with pytest.raises(ValueError, match="not"):
        map_in_two_processes(work, range(3))
    assert psutil.Process().children() == before


def test_a_program_with_threads_does_not_fork() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert set(map_in_two_processes(lambda _: os.getpid(), range(4))) == {os.getpid()}
    finally:
        done.set()
        thread.join()


def helped_while_prepared() -> bool:
    prepared = []

    def prepare() -> None:
        time.sleep(0.3)
        prepared.append(os.getpid())

    found = map_in_two_processes(lambda _: os.getpid(), range(4), prepare=prepare)
    return prepared == [os.getpid()] and os.getpid() not in found


@forks
def test_a_second_process_works_while_the_first_prepares() -> None:
    assert alone(helped_while_prepared) == "True"


def sleep_side_by_side() -> None:
    map_in_two_processes(lambda _: time.sleep(600.0), range(4))


@forks
def test_the_second_process_ends_with_the_first_whatever_ends_that() -> None:
    code = f"from {__name__} import sleep_side_by_side as work; work()"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as first:
        [second] = at_work(psutil.Process(first.pid), 1)
        first.kill()
    assert psutil.wait_procs([second], timeout=5.0)[0] == [second]


def test_whole_searches_are_found_by_their_position() -> None:
    numbers = list[int]()
    texts = [f"{item}" * 90_000 for item in range(9)]
    found = map_in_processes(
        texts.__getitem__, range(9), is_stopped=lambda: False, on_done=lambda done: numbers.append(len(done))
    )
    assert found == dict(enumerate(texts))
    assert (numbers[0], numbers[-1]) == (0, 9)
    assert numbers == sorted(numbers)


def processes_of_searches() -> list[int]:
    """The number of processes that work on items, and of those that the searches in each item use."""

    def work(_item: int) -> tuple[int, int]:
        time.sleep(0.05)
        return os.getpid(), len(set(map_in_two_processes(lambda _: os.getpid(), range(4))))

    found = map_in_processes(work, range(6), is_stopped=lambda: False)
    return [len({process for process, _ in found.values()}), max(number for _, number in found.values())]


@forks
@pytest.mark.check_all
def test_searches_beside_each_other_fork_no_more() -> None:
    processes, inner = ast.literal_eval(alone(processes_of_searches))
    assert processes > 1
    assert inner == 1


def stopped_searches() -> int:
    """The number of items that are done when the third has stopped the rest; no process is left."""
    calls = list[int]()

    def work(item: int) -> int:
        time.sleep(0.02)
        return item

    found = map_in_processes(
        work, range(200), is_stopped=lambda: len(calls) > 3, on_done=lambda done: calls.append(len(done))
    )
    assert psutil.Process().children() == []
    return len(found)


def test_a_stop_keeps_what_is_done() -> None:
    assert 2 < int(alone(stopped_searches)) < 50


def failing_elsewhere() -> dict[int, int]:
    first = os.getpid()

    def work(item: int) -> int:
        time.sleep(0.02)
        if os.getpid() != first:
            raise ValueError("only the first can")
        return item

    return map_in_processes(work, range(5), is_stopped=lambda: False)


@pytest.mark.check_all
def test_searches_that_another_process_fails_at_are_done_by_the_first() -> None:
    assert ast.literal_eval(alone(failing_elsewhere)) == {item: item for item in range(5)}
