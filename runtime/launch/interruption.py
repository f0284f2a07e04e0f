"""A run that is asked to stop does so between two steps, with a checkpoint; asked again, it ends at once.

SIGTERM, SIGINT, SIGHUP and SIGUSR1 ask. The last never ends a run: a scheduler sends it while there is time left, and
SIGTERM when there is none, which then finds a checkpoint on its way. Where the process that launched the ranks gets
one, it makes a mark that they look for, so that what it sends them itself still ends them: that is how torch elastic
clears up behind a rank that failed. A scheduler and a terminal signal the ranks as well.
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
"""A signal that comes sooner after the first is the same wish: timeout(1) sends each twice."""

_asked = threading.Event()
_marks: list[Path] = []
_waits = threading.Event()
"""Set while this process, which launches, waits for other nodes: there is no step to go to the end of."""


def listen(launcher: int | None = None, mark: Path | None = None) -> None:
    """From now on a signal asks this process to stop, but for one from its launcher; so does the mark, if it appears.

    To be called in the main thread before there are others, which would take the signals.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _heeded())
    _marks[:] = [mark] if mark else []
    threading.Thread(target=_wait, args=(launcher,), name="signals", daemon=True).start()


def _heeded() -> tuple[signal.Signals, ...]:
    """The signals that ask; nohup has SIGHUP ignored, which stays so."""
    return tuple(one for one in _SIGNALS if signal.getsignal(one) is not signal.SIG_IGN)


def is_asked() -> bool:
    """Whether this process has been asked to stop."""
    return _asked.is_set() or any(mark.exists() for mark in _marks)


def is_asked_within(seconds: float) -> bool:
    """Waits for so long, or until this process, which launches and has no ranks now, is asked to stop. In another
    thread than the main one nobody asks."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        return asked.wait(seconds)
    before = {number: signal.signal(number, lambda *_: asked.set()) for number in _heeded()}
    try:
        return asked.wait(seconds)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def nothing_to_finish() -> Iterator[None]:
    """Within it the first signal that ends does so at once, in the process that launches."""
    _waits.set()
    try:
        yield
    finally:
        _waits.clear()


def _wait(launcher: int | None) -> None:
    first = math.inf
    while True:
        found = signal.sigwaitinfo(_heeded())
        if found.si_signo in _ENDING:
            first = min(first, time.monotonic())
            if found.si_pid == launcher or time.monotonic() - first > _AGAIN_SECONDS:
                os._exit(128 + found.si_signo)
        _asked.set()


def shield_helpers() -> None:
    """Starts the processes from which multiprocessing forks and by which it clears up, deaf to signals that ask: they
    reach all processes of a terminal or a job, and a run whose helpers have ended cannot end in order."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # which that has let through again
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def heed_again() -> None:
    """In a process that was forked from such a helper and does not listen: signals end it again."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


@contextmanager
def passed_on(mark: Path) -> Iterator[None]:
    """Within it, in the process that launches, a signal makes the mark, and a second one that ends ends the ranks.

    Raises torch's SignalException for the next, and for the first within `nothing_to_finish`. In another thread than
    the main one, which gets no signals, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    first = math.inf
    _waits.clear()

    def ask(number: int, _: FrameType | None) -> None:
        nonlocal first
        is_first, now = not mark.exists(), time.monotonic()
        if number in _ENDING and _waits.is_set():
            raise SignalException(f"asked to stop by {signal.Signals(number).name}", signal.SIGTERM)
        first = min(first, now) if number in _ENDING else first
        if number in _ENDING and now - first > _AGAIN_SECONDS:
            raise SignalException(f"asked to stop twice, by {signal.Signals(number).name}", signal.SIGKILL)
        mark.touch()
        if is_first:
            sys.stderr.write(
                "stopping behind the step that is under way, with a checkpoint; once more stops at once.\n"
            )

    before = {number: signal.signal(number, ask) for number in _heeded()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
