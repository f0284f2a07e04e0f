"""A reward that runs the code of a response against the tests of its prompt: 1 where they pass, else 0.

The code runs in a process of its own as the user who runs the job, with limits on time, memory and files, without the
environment's variables, in an empty directory. That is no sandbox: it may read files and reach the network.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress

from meshwright.runtime.environment.samples import RewardSample

SECONDS = 4.0
"""That code and tests may take."""

_MEMORY_BYTES, _FILE_BYTES, _NUM_FILES = 2**30, 2**20, 64
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)

_RUN = """\
import resource, sys
for limit, most in {limits}:
    resource.setrlimit(getattr(resource, limit), (most, most))
mark, code, tests = (sys.stdin.buffer.read(int(sys.stdin.buffer.readline())).decode() for _ in range(3))
space = {{"__name__": "__main__"}}
exec(compile(code, "response", "exec"), space)
exec(compile(tests, "tests", "exec"), space)
sys.__stdout__.write("\\n" + mark)
"""
"""Says at the end what it was told at the start, so that code which leaves before the tests passes none."""


def unit_tests(samples: Sequence[RewardSample]) -> list[float]:
    """Whether the Python of the response's last fenced block, of all of it where there is none, passes the answer's
    tests."""
    return [float(_passes(_code(sample.response), sample.answer or "")) for sample in samples]


def _code(response: str) -> str:
    blocks = _BLOCK.findall(response)
    return str(blocks[-1]) if blocks else response


def _passes(code: str, tests: str) -> bool:
    limits = [
        ("RLIMIT_CPU", int(SECONDS) + 1),
        ("RLIMIT_AS", _MEMORY_BYTES),
        ("RLIMIT_FSIZE", _FILE_BYTES),
        ("RLIMIT_NOFILE", _NUM_FILES),
        ("RLIMIT_CORE", 0),
    ]
    mark = secrets.token_hex(16)
    told = b"".join(b"%d\n%s" % (len(part), part) for part in (text.encode() for text in (mark, code, tests)))
    with tempfile.TemporaryDirectory(prefix="meshwright-tests-") as directory:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _RUN.format(limits=limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            env={},
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(told, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(process)
    return process.returncode == 0 and output.endswith(mark.encode())


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
