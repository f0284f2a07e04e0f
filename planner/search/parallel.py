"""Runs a pure function on several items in this process and, on Linux, in a forked second process.

Each process takes the next item when it has finished one. The results do not depend on which process computed them.
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

from meshwright.planner.search.child_process import end_with_process

_END_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals by which a user or a scheduler asks a program to end."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_two_processes(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    prepare: Callable[[], None] = lambda: None,
    on_start: Callable[[int], None] = lambda _index: None,
) -> list[Result]:
    """Return the result of `work` for each item, in order; side effects of `work` on memory may be lost.

    `prepare` runs in this process before it takes an item, while the second process already works. `on_start` is
    called in this process with the position of each item that it starts; the items before it are done or being
    computed."""

    def compute_here(index: int) -> Result:
        on_start(index)
        return work(items[index])

    if len(items) < 2 or not _can_share():
        return [compute_here(index) for index in range(len(items))]
    results = _run_in_two_processes(lambda index: work(items[index]), compute_here, len(items), prepare)
    return [results[index] if index in results else compute_here(index) for index in range(len(items))]


def _can_share() -> bool:
    """True if a fork is safe (no other thread can hold a lock) and a second processor is available."""
    return sys.platform == "linux" and threading.active_count() == 1 and len(os.sched_getaffinity(0)) > 1


def _run_in_two_processes(
    remote_work: Callable[[int], Result], local_work: Callable[[int], Result], count: int, prepare: Callable[[], None]
) -> dict[int, Result]:
    """Return what both processes computed; if the second one failed, its items are absent.

    Ctrl-C in a terminal interrupts this process, which then ends the second one.
    """
    items_out, items_in = os.pipe()
    os.write(items_in, bytes(range(count)))
    os.close(items_in)
    results_out, results_in = os.pipe()
    parent = os.getpid()
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)
    with warnings.catch_warnings():
        # Python 3.12 and later warn of a fork beside the idle threads of the linear-algebra library.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        end_with_process(parent)
        os.close(results_out)
        _run_child(results_in, remote_work, items_out)
    signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    os.close(results_in)
    try:
        with open(results_out, "rb") as channel:
            prepare()
            local_results = {index: local_work(index) for index in _take_items(items_out)}
            remote_results = channel.read()
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.close(items_out)
        _, status = os.waitpid(child, 0)
    return {**local_results, **pickle.loads(remote_results)} if status == 0 else local_results


def _take_items(items_out: int) -> Iterator[int]:
    """Take one item after the other from the pipe until it is empty."""
    while index := os.read(items_out, 1):
        yield index[0]


def _run_child(results_in: int, work: Callable[[int], Result], items_out: int) -> NoReturn:
    """Run the second process: compute items, send the results and exit without the first process's exit handlers."""
    status = 1
    try:
        results = pickle.dumps({index: work(index) for index in _take_items(items_out)}, pickle.HIGHEST_PROTOCOL)
        with open(results_in, "wb") as channel:
            channel.write(results)
        status = 0
    finally:
        os._exit(status)
