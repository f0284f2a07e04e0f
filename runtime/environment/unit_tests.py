"""A reward that runs the code of a response against the tests of its prompt: 1 where they pass, else 0.

Code and tests run in two processes, so that code learns nothing of its tests and says nothing of their outcome
(`examining.py`), shut in by what the kernel of this machine has (`sandbox.py`, `supervising.py`).
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from meshwright.profiles.errors import RunFailed
from meshwright.runtime.environment import sandbox
from meshwright.runtime.environment.samples import RewardSample
from meshwright.runtime.environment.supervising import BROKEN, FILTER, NAMESPACES, PASSED

SECONDS = 4.0
"""That code and tests may take."""

_TRIES, _TRY_SECONDS = 3, 20.0
"""For finding out what a machine has, which may be busy."""
_MORE_SECONDS = 10.0
"""Until a supervisor that has not ended what it supervises is ended itself."""
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_WITHOUT_NAMESPACES = (
    "; this machine gives a process no namespaces of its own, so that code can read and write your files and reach "
    "the network: put the run in a container that holds nothing of worth"
)
_IS_THERE = "def is_there():\n    import colorsys\n    return bool(colorsys)\n", "assert is_there()"
"""Code that imports what nothing else has imported, so that Python's files have to be seen."""


def unit_tests(samples: Sequence[RewardSample]) -> list[float]:
    """Whether the Python of the response's last fenced block, of all of it where there is none, passes the answer's
    tests. Raises OSError where the machine no longer offers the sandbox that it had."""
    return [float(_passes(_code(sample.response), sample.answer or "")) for sample in samples]


@functools.cache
def measures() -> str:
    """What shuts code in on this machine, found by trying it: namespaces where a process may have its own, and a filter
    of system calls where libseccomp's bindings are installed. Limits always do. Raises RunFailed where the machine
    neither runs code in namespaces nor says that it has none."""
    found = [FILTER] if sandbox.has_filter() else []
    apart = "+".join([NAMESPACES, *found])
    for _try in range(_TRIES):
        code, _ = _supervised(*_IS_THERE, apart, _TRY_SECONDS)
        if code == PASSED:
            return apart
        if code == BROKEN:
            return "+".join(found)
    raise RunFailed(
        f"the sandbox of unit_tests could not be tried: in {_TRIES} tries of up to {_TRY_SECONDS:g} s a function that "
        "answers True gave no answer; try again when the machine is less busy"
    )


def told_measures() -> str:
    """A sentence that says what is in force, and what is not."""
    found = measures()
    parts = ["limits of time, memory, output and processes"]
    if FILTER in found:
        parts.append("a filter of system calls")
    if NAMESPACES in found:
        parts.append("namespaces (no network, none of your files, no other processes)")
    missing = "" if NAMESPACES in found else _WITHOUT_NAMESPACES
    return f"unit_tests runs the code of responses within {', '.join(parts)}{missing}"


def _code(response: str) -> str:
    blocks = _BLOCK.findall(response)
    return str(blocks[-1]) if blocks else response


def _passes(code: str, tests: str) -> bool:
    found, told = _supervised(code, tests, measures(), SECONDS)
    if found == BROKEN:
        raise OSError(f"the sandbox of this machine is gone: {told}")
    return found == PASSED


def _supervised(code: str, tests: str, wanted: str, seconds: float) -> tuple[int, str]:
    """The supervisor's exit code, and what it said of the machine."""
    parts = (text.encode("utf-8", "surrogatepass") for text in (code, tests))
    given = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    directory = tempfile.mkdtemp(prefix="meshwright-tests-")
    module = "meshwright.runtime.environment.supervising"
    command = [sys.executable, "-I", "-m", module, str(os.getpid()), directory, str(seconds), wanted]
    try:
        ended = subprocess.run(
            command,
            check=False,
            input=given,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=seconds + _MORE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return 1, ""
    finally:
        with suppress(OSError):  # what is left of a directory is no part of the verdict
            remove_tree(Path(directory))
    return ended.returncode, ended.stderr[-200:].decode(errors="replace").strip()


def remove_tree(top: Path) -> None:
    """Removes a directory with all that is in it, however deep: what lies deeper is moved up first, so that no path
    grows long and nothing calls itself."""
    top.chmod(0o700)
    while found := list(os.scandir(top)):
        for entry in found:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for inner in list(os.scandir(entry.path)):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner.path, 0o700)
                    os.rename(inner.path, tempfile.mkdtemp(dir=top))
                else:
                    os.unlink(inner.path)
            os.rmdir(entry.path)
    top.rmdir()
