"""Pure work on several items, shared with a second process where the platform forks one cheaply.

Both take the next item when they have done one. What is found does not depend on which of them did what.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TypeVar

from meshwright.planner.search.child_process import end_with

_ASKING = (signal.SIGINT, signal.SIGTERM)
"""Signals by which a user or a scheduler asks a program to end."""

Item = TypeVar("Item")
Found = TypeVar("Found")


def side_by_side(
    work: Callable[[Item], Found],
    items: Sequence[Item],
    *,
    prepare: Callable[[], None] = lambda: None,
    begun: Callable[[int], None] = lambda _index: None,
) -> list[Found]:
    """What the work finds for each item, in their order; what it changes in memory may be lost.

    `prepare` is what this process has to do before it helps, and a second one need not wait for. `begun` is called here
    with each position that is begun here: those before it are done or under way.
    """

    def one(index: int) -> Found:
        begun(index)
        return work(items[index])

    if len(items) < 2 or not _can_share():
        return [one(index) for index in range(len(items))]
    found = _shared(lambda index: work(items[index]), one, len(items), prepare)
    return [found[index] if index in found else one(index) for index in range(len(items))]


def _can_share() -> bool:
    """Whether a fork is safe, no other thread holding a lock, and there is a processor for it."""
    return sys.platform == "linux" and threading.active_count() == 1 and len(os.sched_getaffinity(0)) > 1


def _shared(
    theirs: Callable[[int], Found], mine: Callable[[int], Found], count: int, prepare: Callable[[], None]
) -> dict[int, Found]:
    """What both processes found; a second that failed leaves out what it took.

    A terminal's Ctrl-C is for this one, which ends the other.
    """
    left, give = os.pipe()
    os.write(give, bytes(range(count)))
    os.close(give)
    answer, tell = os.pipe()
    first = os.getpid()
    asked = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of idle threads of linear algebra, from Python 3.12 on
        second = os.fork()
    if not second:
        end_with(first)
        os.close(answer)
        _tell(tell, theirs, left)
    signal.pthread_sigmask(signal.SIG_SETMASK, asked)
    os.close(tell)
    try:
        with open(answer, "rb") as told:
            prepare()
            here = {index: mine(index) for index in _taken(left)}
            there = told.read()
    except BaseException:
        os.kill(second, signal.SIGKILL)
        raise
    finally:
        os.close(left)
        _, status = os.waitpid(second, 0)
    return {**here, **pickle.loads(there)} if status == 0 else here


def _taken(left: int) -> Iterator[int]:
    """Takes one item after the other from those that are left."""
    while index := os.read(left, 1):
        yield index[0]


def _tell(tell: int, work: Callable[[int], Found], left: int) -> NoReturn:
    """The second process: works, tells what it found and ends, without the first one's exit handlers."""
    status = 1
    try:
        told = pickle.dumps({index: work(index) for index in _taken(left)}, pickle.HIGHEST_PROTOCOL)
        with open(tell, "wb") as channel:
            channel.write(told)
        status = 0
    finally:
        os._exit(status)
