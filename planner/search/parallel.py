"""Runs a pure function on several items in this process and, on Linux, in forked ones: one for the parts of a search
(`map_in_two_processes`), as many as there are processors for whole searches (`map_in_processes`).

Each process takes the next item when it has finished one. The results do not depend on which process computed them.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import NoReturn, TypeVar

from meshwright.planner.search.child_process import end_with_process

_processors_are_taken: ContextVar[bool] = ContextVar("processors are taken", default=False)
"""True in the first process of `map_in_processes` while the others work, so that its own searches fork no more."""

_MAX_PROCESSES = 8
"""Largest number of processes of `map_in_processes`, each of which has the memory of a search."""

_INDEX_BYTES = 4
"""Bytes of the position of an item of `map_in_processes` in the pipe from which processes take it."""

_WAIT_SECONDS = 0.2
"""Longest time after which a request to stop is noticed while only the other processes work."""

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
    is_safe = sys.platform == "linux" and threading.active_count() == 1 and len(os.sched_getaffinity(0)) > 1
    return is_safe and not _processors_are_taken.get()


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

    def run_child() -> NoReturn:
        os.close(results_out)
        _run_child(results_in, remote_work, items_out)

    child = _fork(run_child)
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


def _fork(run_child: Callable[[], NoReturn]) -> int:
    """Fork a process that runs this function and ends with this process; return its id."""
    parent = os.getpid()
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)
    with warnings.catch_warnings():
        # Python 3.12 and later warn of a fork beside the idle threads of the linear-algebra library.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        end_with_process(parent)
        run_child()
    signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    return child


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


def map_in_processes(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    is_stopped: Callable[[], bool],
    on_done: Callable[[Mapping[int, Result]], None] = lambda _results: None,
) -> dict[int, Result]:
    """Return the result of `work` for each item, by its position; side effects of `work` on memory may be lost.

    Once `is_stopped` is true no item is started, the other processes are ended, and what is not done is absent. While
    several processes work, none of their searches forks another one. `on_done` is called in this process with the
    results so far: once before the first, and whenever there may be more. An exception of `work` is raised.
    """
    num_processes = min(len(items), len(os.sched_getaffinity(0)), _MAX_PROCESSES) if _can_share() else 1
    items_out, items_in = os.pipe()
    os.write(items_in, b"".join(index.to_bytes(_INDEX_BYTES, "little") for index in range(len(items))))
    os.close(items_in)
    results: dict[int, Result] = {}
    workers: list[_Worker] = []
    token = _processors_are_taken.set(num_processes > 1)
    try:
        workers += (_fork_worker(lambda index: work(items[index]), items_out) for _ in range(num_processes - 1))
        on_done(results)
        for index in _take_indices(items_out):
            if is_stopped():
                break
            results[index] = work(items[index])
            _collect(workers, results, seconds=0.0)
            on_done(results)
        while not is_stopped() and any(worker.is_open for worker in workers):
            _collect(workers, results, seconds=_WAIT_SECONDS)
            on_done(results)
        _collect(workers, results, seconds=0.0)
    finally:
        _processors_are_taken.reset(token)
        os.close(items_out)
        for worker in workers:
            worker.end()
    for index in range(len(items)):  # those with which another process failed
        if index not in results and not is_stopped():
            results[index] = work(items[index])
            on_done(results)
    return results


@dataclass
class _Worker:
    """A forked process, and the pipe from which its results come; open until the process has ended."""

    pid: int
    results: Connection
    is_open: bool = True

    def end(self) -> None:
        """End the process if it has not ended, and wait for it."""
        self.results.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _fork_worker(work: Callable[[int], Result], items_out: int) -> _Worker:
    results_out, results_in = Pipe(duplex=False)

    def run_child() -> NoReturn:
        try:
            for index in _take_indices(items_out):
                results_in.send((index, work(index)))
        finally:
            os._exit(0)

    child = _fork(run_child)
    results_in.close()
    return _Worker(child, results_out)


def _collect(workers: Sequence[_Worker], results: dict[int, Result], *, seconds: float) -> None:
    """Take the results that other processes have sent, after waiting at most this long for the first."""
    while ready := wait([worker.results for worker in workers if worker.is_open], seconds):
        seconds = 0.0
        for worker in workers:
            if worker.results not in ready:
                continue
            try:
                index, result = worker.results.recv()
            except (EOFError, OSError):
                worker.is_open = False
            else:
                results[index] = result


def _take_indices(items_out: int) -> Iterator[int]:
    """Take the position of one item after the other from the pipe until it is empty."""
    while index := os.read(items_out, _INDEX_BYTES):
        yield int.from_bytes(index, "little")
