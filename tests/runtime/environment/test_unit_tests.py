"""Code is right where it passes its tests, within its limits, and says nothing of them itself."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from meshwright.profiles.errors import RunFailed
from meshwright.runtime.environment import unit_tests as tested
from meshwright.runtime.environment.unit_tests import unit_tests
from tests.runtime.environment.samples import sample

RIGHT = "def twice(x):\n    return 2 * x\n"
TESTS = "assert twice(3) == 6\nassert twice(0) == 0\n"
WRONG = "def twice(x):\n    return x + 1\n"

ALWAYS = """\
class Always:
    def __init__(self, *a): pass
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = lambda *a: True
    __ne__ = lambda *a: False
    __hash__ = lambda *a: 0
    __abs__ = __float__ = __round__ = lambda *a: 0.0
    __sub__ = __rsub__ = lambda *a: 0
twice = Always
twice = lambda x: Always()
"""
"""An object that is equal to everything, and no further than 0 from any number."""

CHEATS = {
    "the mark of a frame is printed": """\
import os, sys
for depth in range(12):
    try:
        space = sys._getframe(depth).f_globals
    except ValueError:
        break
    for value in list(space.values()):
        if isinstance(value, str) and len(value) == 32:
            os.write(1, ("\\n" + value).encode())
            sys.__stdout__.write("\\n" + value)
            sys.__stdout__.flush()
            os._exit(0)
""",
    "exec does nothing": "import builtins\nbuiltins.exec = lambda *a: None\n",
    "compile gives nothing": (
        "import builtins\nreal = compile\nbuiltins.compile = lambda *a, **k: real('', '', 'exec')\n"
    ),
    "assertions are switched off": "import builtins\nbuiltins.AssertionError = type('E', (BaseException,), {})\n",
    "json says what it likes": "import json\njson.loads = lambda *a: {'value': True}\njson.dumps = lambda *a: '{}'\n",
    "it leaves": "import os\nos._exit(0)\n",
    "it leaves in a call": "import os\ntwice = lambda x: os._exit(0)\n",
    "every pipe is told that all is well": """\
import os
for number in range(3, 64):
    for text in (b"passed", b'{"passed": true}\\n', b"\\n"):
        try:
            os.write(number, text)
        except OSError:
            pass
os._exit(0)
""",
    "an object that is equal to everything": ALWAYS,
    "a class that is equal to everything": ALWAYS + "twice = Always\n",
    "an int that is equal to everything": (
        "class Number(int):\n    __eq__ = lambda *a: True\n    __hash__ = int.__hash__\ntwice = lambda x: Number(1)\n"
    ),
    "the parent's memory is looked at": """\
import os
for process in os.listdir("/proc") if os.path.isdir("/proc") else []:
    if process.isdigit() and int(process) != os.getpid():
        open(f"/proc/{process}/mem", "rb").read(1)
""",
    "a function of the tests is said to be a module": """\
import types
class Module(types.ModuleType):
    __call__ = lambda *a: 0
abs = Module("nope")
"""
    + WRONG,
    "the code is said to be a module": """\
import types
class Module(types.ModuleType):
    __call__ = lambda self, x: x + 1
twice = Module("nope")
def abs(x): return 0
""",
    "a name of the tests' own is offered": """\
import sys
peer = sys._getframe(1).f_locals["peer"]
real = peer.send
def send(message):
    if "names" in message:
        message["names"]["__builtins__"] = peer.pack({"range": lambda *a: []})
    real(message)
peer.send = send
"""
    + WRONG,
    "a function of the tests is replaced": "def abs(x): return 0\ndef len(x): return 0\n" + WRONG,
}


@pytest.mark.parametrize(
    "response", [RIGHT, f"Here it is:\n```python\n{RIGHT}```\nDone.", f"```\nx = 1\n```\n```py\n{RIGHT}```"]
)
def test_code_that_passes_is_paid(response: str) -> None:
    assert unit_tests([sample(response, TESTS)]) == [1.0]


@pytest.mark.parametrize(
    "response",
    [
        "def twice(x):\n    return x\n",
        "def twice(x) return",
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "twice = bytearray(2**31)",
        "open('large', 'wb').write(bytes(2**22)); twice = lambda x: 2 * x",
        "\ud800",
        "twice = lambda x: 2 * x; raise SystemExit(0)",
    ],
)
def test_code_that_fails_leaves_or_takes_too_much_is_not(response: str) -> None:
    assert unit_tests([sample(response, TESTS)]) == [0.0]


@pytest.mark.parametrize("name", CHEATS)
def test_code_that_passes_nothing_is_not_paid_whatever_it_does(name: str) -> None:
    tests = "for x in range(3, 4):\n    assert abs(twice(x) - 2.0 * x) < 1e-6\n"
    assert unit_tests([sample(CHEATS[name], tests)]) == [0.0]


@pytest.fixture
def _measured_anew() -> Iterator[None]:
    tested.sandbox_measures.cache_clear()
    yield
    tested.sandbox_measures.cache_clear()


@pytest.mark.usefixtures("_measured_anew")
def test_a_machine_too_busy_to_try_namespaces_is_tried_again_and_then_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before, tries = tested.sandbox_measures(), list[float]()
    tested.sandbox_measures.cache_clear()
    real = tested._supervise

    def first_too_slow(code: str, tests: str, wanted: str, seconds: float) -> tuple[int, str]:
        tries.append(seconds)
        return real(code, tests, wanted, 0.001 if len(tries) == 1 else seconds)

    def too_slow(code: str, tests: str, wanted: str, seconds: float) -> tuple[int, str]:
        return real(code, tests, wanted, 0.001)

    monkeypatch.setattr(tested, "_supervise", first_too_slow)
    assert tested.sandbox_measures() == before
    tested.sandbox_measures.cache_clear()
    monkeypatch.setattr(tested, "_supervise", too_slow)
    with pytest.raises(RunFailed, match="could not be tried"):
        tested.sandbox_measures()


def test_an_answer_without_a_test_pays_nothing() -> None:
    assert unit_tests([sample(RIGHT, tests) for tests in (None, "", "# twice\n")]) == [0.0] * 3


def test_code_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "TIME_LIMIT_SECONDS", 0.5)
    begun = time.monotonic()
    assert unit_tests([sample("while True: pass", TESTS)]) == [0.0]
    assert time.monotonic() - begun < 5.0


HUNGRY = {
    "it prints without end": "import os\nwhile True: os.write(1, bytes(2**20)); os.write(2, bytes(2**20))\n",
    "it fills the disk": "n = 0\nwhile True:\n    n += 1\n    open(f'file{n}', 'wb').write(bytes(2**20))\n",
    "its children fill the memory": """\
import os, time
for _ in range(64):
    if not os.fork():
        held = bytearray(500 * 2**20)
        time.sleep(60)
time.sleep(60)
""",
    "it forks without end": "import os, time\nfor _ in range(9): os.fork()\ntime.sleep(60)\n",
    "its answer has no end": "twice = lambda x: 'a' * 10**9\n",
    "its answer is deep": (
        "def twice(x):\n    found = []\n    for _ in range(10**6): found = [found]\n    return found\n"
    ),
}


@pytest.mark.parametrize("name", HUNGRY)
def test_code_that_takes_too_much_is_ended_and_leaves_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "TIME_LIMIT_SECONDS", 1.5)
    others, before, begun = set(psutil.Process().children(recursive=True)), free_bytes(), time.monotonic()
    assert unit_tests([sample(HUNGRY[name], TESTS)]) == [0.0]
    assert time.monotonic() - begun < 6.0
    assert descendants(others) == set()
    assert free_bytes() > before - 2**29


def free_bytes() -> int:
    return psutil.disk_usage(tempfile.gettempdir()).free


def descendants(others: set[psutil.Process]) -> set[psutil.Process]:
    """Processes that this one has started beside the others, where there still are some after a while."""
    gone_by = time.monotonic() + 2.0
    while (found := set(psutil.Process().children(recursive=True)) - others) and time.monotonic() < gone_by:
        time.sleep(0.02)
    return found


ESCAPE = """\
import os, subprocess, sys
if not os.fork():
    os.setsid()
    if not os.fork():
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(61.25)"])
    os._exit(0)
"""


def test_children_that_leave_their_session_are_ended_too() -> None:
    assert unit_tests([sample(ESCAPE + RIGHT, TESTS)]) == [1.0]
    until = time.monotonic() + 2.0
    while (left := asleep("61.25")) and time.monotonic() < until:
        time.sleep(0.02)
    assert left == []


def asleep(seconds: str) -> list[list[str]]:
    commands = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    return [command for command in commands if any(f"time.sleep({seconds})" in word for word in command[-1:])]


def test_directories_in_each_other_are_removed_however_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    deep = "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\nos.chmod('.', 0)\n"
    assert unit_tests([sample(deep + RIGHT, TESTS)]) == [1.0]
    assert os.listdir(tmp_path) == []


def test_code_can_end_its_own_processes_where_its_reward_holds_signals_back() -> None:
    code = (
        "import subprocess\ndef f():\n    p = subprocess.Popen(['sleep', '60'])\n    p.terminate()\n    return p.wait()"
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        assert unit_tests([sample(code, "assert f() == -15")]) == [1.0]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_directory_is_removed_whatever_code_has_called_what_is_in_it(tmp_path: Path) -> None:
    top = tmp_path / "top"
    for name in ("a/b/c", "a/d", *(f".{number}/e" for number in range(4, 9))):
        (top / name).mkdir(parents=True)
    for number in range(1, 4):
        (top / f".{number}").touch()
    tested.remove_tree(top)
    assert not top.exists()


def test_a_directory_that_cannot_be_removed_changes_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(top: Path) -> None:
        real(top)
        raise OSError

    real = tested.remove_tree
    monkeypatch.setattr(tested, "remove_tree", fail)
    assert unit_tests([sample(RIGHT, TESTS), sample(WRONG, TESTS)]) == [1.0, 0.0]
