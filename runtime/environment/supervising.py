"""Runs code and its tests apart from each other and from the rest of the machine, and says by its exit code whether
the tests passed.

    python -I -m meshwright.runtime.environment.supervising PARENT DIRECTORY SECONDS MEASURES

The code comes first on the standard input and the tests behind it, each behind its length. This process and its first
child run nothing of either: the child starts both, watches them, and ends all that they have started.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NoReturn

from meshwright.planner.search.parent_death import end_with_parent
from meshwright.runtime.environment import examining, sandbox
from meshwright.runtime.environment.keeping import descendants, end_all

PASSED, FAILED, BROKEN = 93, 94, 95
"""Exit codes: that of passed tests, that of any others, and that of a machine that has not what was asked for."""
NAMESPACES, FILTER = "namespaces", "filter"

_LOOK_SECONDS = 0.02
_MOST_PROCESSES, _MOST_BYTES = 64, 2**30
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def main() -> NoReturn:
    """Ends with one of the exit codes."""
    parent, directory, seconds, measures = sys.argv[1:]
    end_with_parent(int(parent))
    deadline = time.monotonic() + float(seconds)
    try:
        if FILTER in measures:
            sandbox.require_filter()
        if NAMESPACES in measures:
            sandbox.leave(Path(directory))
        else:
            sandbox.adopt()
        sandbox.close_to_others()
        child = _forked(lambda: _watch(Path(directory), deadline, measures))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        end_all(descendants)
    except OSError as error:
        os.write(2, f"{error}\n".encode())
        code = BROKEN
    os._exit(code if code in (PASSED, BROKEN) else FAILED)


def _watch(directory: Path, deadline: float, measures: str) -> int:
    """What the first process inside does: it starts the code and the tests, and ends them at the deadline or when they
    take too much."""
    end_with_parent()
    is_apart = NAMESPACES in measures
    if is_apart:
        sandbox.enter(directory)
    else:
        sandbox.adopt()
        os.chdir(directory)
    os.environ.clear()
    os.environ.update({"HOME": os.getcwd(), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    code, with_filter, seconds = _part(), FILTER in measures, deadline - time.monotonic()
    own, others = socket.socketpair()
    _forked(lambda: _offer(code, others, seconds, with_filter))
    others.close()
    tests = _part()
    examiner = _forked(lambda: _examine(tests, own, seconds, with_filter))
    own.close()
    found = _all_inside if is_apart else descendants
    try:
        while time.monotonic() < deadline:
            signal.sigtimedwait({signal.SIGCHLD}, _LOOK_SECONDS)
            with suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    if ended[0] == examiner:
                        return os.waitstatus_to_exitcode(ended[1])
            if _takes_too_much(found()):
                break
        return FAILED
    finally:
        end_all(found)


def _offer(code: str, other: socket.socket, seconds: float, with_filter: bool) -> int:
    incoming, outgoing = _shut_in(other, seconds, with_filter)
    examining.offer(code, incoming, outgoing)
    return FAILED


def _examine(tests: str, other: socket.socket, seconds: float, with_filter: bool) -> int:
    incoming, outgoing = _shut_in(other, seconds, with_filter)
    return PASSED if examining.passes(tests, incoming, outgoing) else FAILED


def _shut_in(other: socket.socket, seconds: float, with_filter: bool) -> tuple[BinaryIO, BinaryIO]:
    """What this process reads of the other one, and writes to it; the standard files lead nowhere, and no other file
    that the supervising process has open stays open here."""
    end_with_parent()
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != other.fileno():
            with suppress(OSError):  # that of the list itself
                os.close(int(name))
    null = os.open("/dev/null", os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.close(null)
    # where this is a fork of a process that had its own, they were of files that are closed now
    sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sandbox.confine(seconds, with_filter=with_filter)
    return other.makefile("rb"), other.makefile("wb")


def _forked(work: Callable[[], int]) -> int:
    """The number of a new process that ends with the exit code that `work` answers."""
    child = os.fork()
    if child:
        return child
    code = FAILED
    try:
        code = work()
    except OSError as error:
        os.write(2, f"{error}\n".encode())
        code = BROKEN
    finally:
        os._exit(code)


def _part() -> str:
    """The next part of the standard input."""
    length = int.from_bytes(_bytes(8), "big")
    return _bytes(length).decode("utf-8", "surrogatepass")


def _bytes(number: int) -> bytes:
    found = bytearray()
    while len(found) < number and (read := os.read(0, number - len(found))):
        found += read
    return bytes(found)


def _all_inside() -> list[int]:
    """All processes of the namespace but the first."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _takes_too_much(processes: list[int]) -> bool:
    return len(processes) > _MOST_PROCESSES or sum(map(_resident_bytes, processes)) > _MOST_BYTES


def _resident_bytes(process: int) -> int:
    """Memory of a process that it shares with no file."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{process}/statm").read_text().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * _PAGE_BYTES


if __name__ == "__main__":
    main()
