"""Runs code and its tests in two sandboxed processes; its exit code says whether the tests passed.

    python -I -m meshwright.runtime.environment.supervising PARENT DIRECTORY SECONDS MEASURES

PARENT is the id of a process: when it ends, so does this one. SECONDS is the time limit, and MEASURES names the sandbox
measures to use.
Standard input has the code and then the tests, each after its length in bytes. This process and its first child run
neither: the child starts a process for each of the two, watches both, and ends everything that they have started.
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
from meshwright.runtime.environment.process_tree import descendants, kill_all

PASSED, FAILED, UNSUPPORTED = 93, 94, 95
"""Exit codes: the tests passed, they did not, or this machine lacks one of the requested sandbox measures."""
NAMESPACES, FILTER = "namespaces", "filter"

_POLL_SECONDS = 0.02
_MAX_PROCESSES, _MAX_BYTES = 64, 2**30
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def main() -> NoReturn:
    """Run the code and the tests, and exit with one of the exit codes."""
    parent, directory, seconds, measures = sys.argv[1:]
    end_with_parent(int(parent))
    deadline = time.monotonic() + float(seconds)
    try:
        if FILTER in measures:
            sandbox.require_filter()
        if NAMESPACES in measures:
            sandbox.unshare_namespaces(Path(directory))
        else:
            sandbox.become_subreaper()
        sandbox.forbid_inspection()
        child = _fork(lambda: _watch(Path(directory), deadline, measures))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        kill_all(descendants)
    except OSError as error:
        os.write(2, f"{error}\n".encode())
        code = UNSUPPORTED
    os._exit(code if code in (PASSED, UNSUPPORTED) else FAILED)


def _watch(directory: Path, deadline: float, measures: str) -> int:
    """Run the code and the tests as the first process in the sandbox, and return the exit code.

    Both are killed at the deadline or when they use too many processes or too much memory.
    """
    end_with_parent()
    has_namespaces = NAMESPACES in measures
    if has_namespaces:
        sandbox.enter_root(directory)
    else:
        sandbox.become_subreaper()
        os.chdir(directory)
    os.environ.clear()
    os.environ.update({"HOME": os.getcwd(), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    code, with_filter, seconds = _read_text(), FILTER in measures, deadline - time.monotonic()
    tests_socket, code_socket = socket.socketpair()
    _fork(lambda: _serve_code(code, code_socket, seconds, with_filter))
    code_socket.close()
    tests = _read_text()
    tests_process = _fork(lambda: _run_tests(tests, tests_socket, seconds, with_filter))
    tests_socket.close()
    processes = _namespace_processes if has_namespaces else descendants
    try:
        while time.monotonic() < deadline:
            signal.sigtimedwait({signal.SIGCHLD}, _POLL_SECONDS)
            with suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    if ended[0] == tests_process:
                        return os.waitstatus_to_exitcode(ended[1])
            if _exceeds_limits(processes()):
                break
        return FAILED
    finally:
        kill_all(processes)


def _serve_code(code: str, other: socket.socket, seconds: float, with_filter: bool) -> int:
    incoming, outgoing = _confined_streams(other, seconds, with_filter)
    examining.serve_code(code, incoming, outgoing)
    return FAILED


def _run_tests(tests: str, other: socket.socket, seconds: float, with_filter: bool) -> int:
    incoming, outgoing = _confined_streams(other, seconds, with_filter)
    return PASSED if examining.passes_tests(tests, incoming, outgoing) else FAILED


def _confined_streams(other: socket.socket, seconds: float, with_filter: bool) -> tuple[BinaryIO, BinaryIO]:
    """Confine this process and return the files to read from and write to the other one.

    Standard files are redirected to /dev/null, and all other inherited files are closed.
    """
    end_with_parent()
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != other.fileno():
            with suppress(OSError):  # the file of the listing itself
                os.close(int(name))
    null = os.open("/dev/null", os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.close(null)
    # Python's own streams may belong to files that were closed above
    sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sandbox.confine(seconds, with_filter=with_filter)
    return other.makefile("rb"), other.makefile("wb")


def _fork(work: Callable[[], int]) -> int:
    """Fork a process that runs `work` and exits with its result; return the process id."""
    child = os.fork()
    if child:
        return child
    code = FAILED
    try:
        code = work()
    except OSError as error:
        os.write(2, f"{error}\n".encode())
        code = UNSUPPORTED
    finally:
        os._exit(code)


def _read_text() -> str:
    """Read the next text from standard input."""
    length = int.from_bytes(_read_bytes(8), "big")
    return _read_bytes(length).decode("utf-8", "surrogatepass")


def _read_bytes(number: int) -> bytes:
    content = bytearray()
    while len(content) < number and (read := os.read(0, number - len(content))):
        content += read
    return bytes(content)


def _namespace_processes() -> list[int]:
    """Return the ids of all processes in the namespace except the first."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _exceeds_limits(processes: list[int]) -> bool:
    return len(processes) > _MAX_PROCESSES or sum(map(_resident_bytes, processes)) > _MAX_BYTES


def _resident_bytes(process: int) -> int:
    """Return the resident memory of a process without pages that are backed by files."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{process}/statm").read_text().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * _PAGE_BYTES


if __name__ == "__main__":
    main()
