"""A reward function that runs the code of a response against the tests of its prompt: 1 if they pass, else 0.

Code and tests run in two processes, so that code can neither read its tests nor decide their outcome (`examining.py`),
sandboxed by what the kernel of this machine offers (`sandbox.py`, `supervising.py`).
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
from meshwright.runtime.environment.supervising import FILTER, NAMESPACES, PASSED, UNSUPPORTED

TIME_LIMIT_SECONDS = 4.0
"""Time limit of code and tests together."""

_TRIES, _TRY_SECONDS = 3, 20.0
"""Number and time limit of attempts to find out what a machine offers, since it may be busy."""
_GRACE_SECONDS = 10.0
"""Seconds after the time limit at which the supervisor itself is killed."""
_CODE_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_WITHOUT_NAMESPACES = (
    "; this machine gives a process no namespaces of its own, so that code can read and write your files and reach "
    "the network: put the run in a container that holds nothing of value"
)
_TRIAL = "def is_there():\n    import colorsys\n    return bool(colorsys)\n", "assert is_there()"
"""Code and its test: they pass only if the sandbox lets Python import a module that is not loaded yet."""


def unit_tests(samples: Sequence[RewardSample]) -> list[float]:
    """Score 1 if the code passes the tests in the answer, else 0.

    The code is the last fenced block of the response, or the whole response without one. Raises OSError if the machine
    no longer offers the sandbox that it had.
    """
    return [float(_passes(_code(sample.response), sample.answer or "")) for sample in samples]


@functools.cache
def sandbox_measures() -> str:
    """Return the sandbox measures that this machine offers in addition to limits, found by trying them.

    They are namespaces if a process may create its own, and a system-call filter if libseccomp's bindings are
    installed. Raises RunFailed if a trial neither runs in namespaces nor reports that there are none.
    """
    without_namespaces = [FILTER] if sandbox.has_filter() else []
    with_namespaces = "+".join([NAMESPACES, *without_namespaces])
    for _try in range(_TRIES):
        code, _ = _supervise(*_TRIAL, with_namespaces, _TRY_SECONDS)
        if code == PASSED:
            return with_namespaces
        if code == UNSUPPORTED:
            return "+".join(without_namespaces)
    raise RunFailed(
        f"the sandbox of unit_tests could not be tried: in {_TRIES} tries of up to {_TRY_SECONDS:g} s a function that "
        "answers True gave no answer; try again when the machine is less busy"
    )


def describe_sandbox() -> str:
    """Return a sentence that says which sandbox measures are used, and which are missing."""
    in_use = sandbox_measures()
    parts = ["limits of time, memory, output and processes"]
    if FILTER in in_use:
        parts.append("a filter of system calls")
    if NAMESPACES in in_use:
        parts.append("namespaces (no network, none of your files, no other processes)")
    missing = "" if NAMESPACES in in_use else _WITHOUT_NAMESPACES
    return f"unit_tests runs the code of responses within {', '.join(parts)}{missing}"


def _code(response: str) -> str:
    blocks = _CODE_BLOCK.findall(response)
    return str(blocks[-1]) if blocks else response


def _passes(code: str, tests: str) -> bool:
    exit_code, error = _supervise(code, tests, sandbox_measures(), TIME_LIMIT_SECONDS)
    if exit_code == UNSUPPORTED:
        raise OSError(f"the sandbox of this machine is gone: {error}")
    return exit_code == PASSED


def _supervise(code: str, tests: str, measures: str, seconds: float) -> tuple[int, str]:
    """Run a supervisor and return its exit code and its last error output."""
    encoded = (text.encode("utf-8", "surrogatepass") for text in (code, tests))
    stdin = b"".join(len(part).to_bytes(8, "big") + part for part in encoded)
    directory = tempfile.mkdtemp(prefix="meshwright-tests-")
    module = "meshwright.runtime.environment.supervising"
    command = [sys.executable, "-I", "-m", module, str(os.getpid()), directory, str(seconds), measures]
    try:
        ended = subprocess.run(
            command,
            check=False,
            input=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=seconds + _GRACE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return 1, ""
    finally:
        with suppress(OSError):  # a directory that cannot be removed does not change the verdict
            remove_tree(Path(directory))
    return ended.returncode, ended.stderr[-200:].decode(errors="replace").strip()


def remove_tree(top: Path) -> None:
    """Remove a directory of any depth; deeper directories are moved up first, so that no path grows long."""
    top.chmod(0o700)
    while entries := list(os.scandir(top)):
        for entry in entries:
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
