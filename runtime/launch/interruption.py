"""Signals: a first request stops a run between two steps, with a checkpoint; a second one ends it at once.

SIGTERM, SIGINT, SIGHUP and SIGUSR1 request a stop. SIGUSR1 never ends a run: schedulers send it as an early warning
and SIGTERM when time is up, by which time the checkpoint has been started. A launcher that receives a signal creates a
stop file, which the ranks poll, so that signals from the launcher itself can still end them: torch elastic does so
after a rank has failed. Schedulers and terminals signal the ranks directly as well.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SIGNALS = (*_ENDING, signal.SIGUSR1)

_AGAIN_SECONDS = 1.0
"""A signal within this time of the first is the same request: timeout(1) sends each twice."""

_stop_requested = threading.Event()
_stop_files: list[Path] = []
_waits_for_nodes = threading.Event()
"""Set while the launcher waits for other nodes: there is no step to finish."""


def listen(launcher: int | None = None, stop_file: Path | None = None) -> None:
    """Start to treat signals, except those that the process `launcher` sends, and `stop_file` as requests to stop.

    Call it in the main thread before other threads exist, which would otherwise receive the signals.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _stop_signals())
    _stop_files[:] = [stop_file] if stop_file else []
    threading.Thread(target=_receive_signals, args=(launcher,), name="signals", daemon=True).start()


def _stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that request a stop; one that is ignored, as SIGHUP under nohup, stays ignored."""
    return tuple(one for one in _SIGNALS if signal.getsignal(one) is not signal.SIG_IGN)


def stop_requested() -> bool:
    """Return True if a stop of this process was requested."""
    return _stop_requested.is_set() or any(path.exists() for path in _stop_files)


def stop_requested_within(seconds: float) -> bool:
    """Wait in a launcher without ranks; return True if a stop is requested within `seconds`.

    Outside the main thread, which alone receives signals, it only waits.
    """
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        return requested.wait(seconds)
    previous = {number: signal.signal(number, lambda *_: requested.set()) for number in _stop_signals()}
    try:
        return requested.wait(seconds)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def nothing_to_finish() -> Iterator[None]:
    """Context in which the first terminating signal ends the launcher at once."""
    _waits_for_nodes.set()
    try:
        yield
    finally:
        _waits_for_nodes.clear()


def _receive_signals(launcher: int | None) -> None:
    """Record requests to stop; exit on the second terminating signal, or on the first from the launcher."""
    first = math.inf
    while True:
        received = signal.sigwaitinfo(_stop_signals())
        if received.si_signo in _ENDING:
            first = min(first, time.monotonic())
            if received.si_pid == launcher or time.monotonic() - first > _AGAIN_SECONDS:
                os._exit(128 + received.si_signo)
        _stop_requested.set()


def shield_helpers() -> None:
    """Start multiprocessing's fork server and resource tracker with the stop signals blocked.

    These signals reach every process of a terminal or a job, and a run without these helpers cannot end cleanly.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # ensure_running has unblocked them
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def unblock_signals() -> None:
    """Unblock the stop signals in a process that was forked by a helper of `shield_helpers` and does not `listen`."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


@contextmanager
def forwarded_signals(stop_file: Path) -> Iterator[None]:
    """Context in which a signal to the launcher creates the stop file `stop_file`, and a second one ends the ranks.

    Only a terminating signal counts as a second one; it raises torch's SignalException. Within `nothing_to_finish` the
    first one raises it already. Outside the main thread, which alone receives signals, the context does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    first = math.inf
    _waits_for_nodes.clear()

    def request_stop(number: int, _: FrameType | None) -> None:
        nonlocal first
        is_first, now = not stop_file.exists(), time.monotonic()
        if number in _ENDING and _waits_for_nodes.is_set():
            raise SignalException(f"asked to stop by {signal.Signals(number).name}", signal.SIGTERM)
        first = min(first, now) if number in _ENDING else first
        if number in _ENDING and now - first > _AGAIN_SECONDS:
            raise SignalException(f"asked to stop twice, by {signal.Signals(number).name}", signal.SIGKILL)
        stop_file.touch()
        if is_first:
            sys.stderr.write("stopping after the current step, with a checkpoint; signal again to stop at once.\n")

    previous = {number: signal.signal(number, request_stop) for number in _stop_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
