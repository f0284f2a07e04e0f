"""A supervisor says whether tests passed, or that the machine has not what was asked for, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from meshwright.runtime.environment.supervising import FAILED, NAMESPACES, PASSED, UNSUPPORTED
from meshwright.runtime.environment.unit_tests import sandbox_measures

BUSY = "import os\nfor _ in range(3):\n    if not os.fork():\n        os.setsid()\n        while True: pass\n"


def start(code: str, tests: str, directory: Path, wanted: str, seconds: float = 5.0) -> subprocess.Popen[bytes]:
    module = "meshwright.runtime.environment.supervising"
    command = [sys.executable, "-I", "-m", module, str(os.getpid()), str(directory), str(seconds), wanted]
    found = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert found.stdin is not None
    for part in (code.encode(), tests.encode()):
        found.stdin.write(len(part).to_bytes(8, "big") + part)
    found.stdin.close()
    return found


@pytest.mark.parametrize("wanted", [sandbox_measures(), ""], ids=["with all there is", "with limits alone"])
def test_its_exit_code_says_whether_the_tests_passed(wanted: str, tmp_path: Path) -> None:
    for tests, code in (("assert f() == 1", PASSED), ("assert f() == 2", FAILED)):
        directory = tmp_path / str(code)
        directory.mkdir()
        assert start("def f(): return 1", tests, directory, wanted).wait(30.0) == code


OPEN_FILES = """import os
def open_files():
    names = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sorted(os.readlink(name).partition(":")[0] for name in names if os.path.lexists(name))
"""


@pytest.mark.parametrize("wanted", [sandbox_measures(), ""], ids=["with all there is", "with limits alone"])
def test_code_and_tests_have_no_file_open_but_their_end_of_the_line_between_them(wanted: str, tmp_path: Path) -> None:
    needed = ["/dev/null", "/dev/null", "/dev/null", "socket"]
    tests = f"{OPEN_FILES}\nassert of_code() == {needed}\nassert open_files() == {needed}"
    assert start(f"{OPEN_FILES}\nof_code = open_files", tests, tmp_path, wanted).wait(30.0) == PASSED


@pytest.mark.parametrize("wanted", [sandbox_measures(), ""], ids=["with all there is", "with limits alone"])
def test_all_that_code_has_started_ends_with_the_tests(wanted: str, tmp_path: Path) -> None:
    supervisor = start(
        BUSY + "def f(): return 1", "import time\ntime.sleep(0.5)\nassert f() == 1", tmp_path, wanted, 20.0
    )
    started = when_there_are(supervisor, 6)
    assert supervisor.wait(30.0) == PASSED
    assert psutil.wait_procs(started, timeout=5.0)[1] == []


@pytest.mark.skipif("namespaces" not in sandbox_measures(), reason="this machine has no namespaces for it")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_all_that_code_has_started_ends_when_its_supervisor_is_killed(number: signal.Signals, tmp_path: Path) -> None:
    supervisor = start(BUSY + "while True: pass", "f()", tmp_path, sandbox_measures(), 60.0)
    started = when_there_are(supervisor, 6)
    supervisor.send_signal(number)
    supervisor.wait(10.0)
    assert psutil.wait_procs(started, timeout=5.0)[1] == []


def when_there_are(supervisor: subprocess.Popen[bytes], number: int) -> list[psutil.Process]:
    """What a supervisor has started, as soon as there are so many processes."""
    until = time.monotonic() + 20.0
    while len(found := psutil.Process(supervisor.pid).children(recursive=True)) < number:
        assert time.monotonic() < until, found
        time.sleep(0.01)
    return found


def test_a_sandbox_that_the_machine_has_not_is_no_verdict(tmp_path: Path) -> None:
    """Namespaces need an empty directory of their own, and this one is not there."""
    assert start("def f(): return 1", "assert f() == 1", tmp_path / "none", "namespaces").wait(30.0) == UNSUPPORTED


NOBODY = 65534
AS_NOBODY = f"""
import codecs, ctypes, os, sys
from meshwright.runtime.environment import sandbox, supervising
codecs.lookup("ascii")  # loads, as the next line, what nobody may not be able to read
sandbox.has_filter()
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
PR_SET_DUMPABLE = 4
ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # as for a process that this user has started
"""
CAN_HAVE_NAMESPACES = "CLONE_NEWUSER = 0x10000000\nsys.exit(ctypes.CDLL(None).unshare(CLONE_NEWUSER) != 0)"
SUPERVISES = "sys.argv[1:] = [str(os.getppid()), *sys.argv[1:]]\nsupervising.main()"


def as_nobody(work: str, *arguments: str, given: bytes = b"") -> int:
    """The exit code of this work in a process that began as root, with all that is read then, and is root no longer."""
    return subprocess.run(
        [sys.executable, "-I", "-c", AS_NOBODY + work, *arguments], input=given, check=False
    ).returncode


@pytest.mark.skipif(
    NAMESPACES not in sandbox_measures() or os.getuid() != 0, reason="whoever runs the other tests is no root"
)
def test_a_user_who_is_not_root_gets_namespaces_too() -> None:
    if as_nobody(CAN_HAVE_NAMESPACES):
        pytest.skip("this machine has namespaces for root alone")
    parts = (b"import os\ndef f(): return os.getcwd()", b"assert f() == '/of-the-response'")
    given = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    with tempfile.TemporaryDirectory() as directory:
        os.chown(directory, NOBODY, NOBODY)
        assert as_nobody(SUPERVISES, directory, "10", sandbox_measures(), given=given) == PASSED
