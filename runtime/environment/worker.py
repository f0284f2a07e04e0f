"""The client of a worker process: it sends batches, kills a process that takes too long, and starts a new one."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from meshwright.planner.program.durations import IMPORT_SECONDS
from meshwright.runtime.environment.samples import RewardError, RewardSample, printable_reason, validate_scores
from meshwright.runtime.environment.worker_process import FunctionKind

_END_SECONDS = 5.0
"""Seconds that a process may take to end, after each signal."""
_READ_BYTES = 2**16
_MAX_ANSWER_BYTES = 2**24


class Worker:
    """Calls one function in one worker process at a time, which is started with the first batch."""

    def __init__(self, function: str, timeout_seconds: float, kind: FunctionKind = "reward") -> None:
        """`function` is a built-in function or module:function; `timeout_seconds` is the time limit of a batch."""
        self._function, self._timeout, self._kind = function, timeout_seconds, kind
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def score(self, samples: Sequence[RewardSample]) -> list[float]:
        """Return the scores of a batch. Raises RewardError as `answers` does, and for a score that is not finite."""
        return validate_scores(self.answers(samples), len(samples))

    def answers(self, samples: Sequence[RewardSample]) -> list[Any]:
        """Return the answers to a batch. Raises RewardError if the function fails, times out or ends its process."""
        if self._is_closed:
            raise RewardError("its worker was closed before the call")
        process = self._process or self._start()
        line = json.dumps([sample.message for sample in samples]) + "\n"
        answers = self._exchange(process, line.encode(), self._timeout)
        if len(answers) != len(samples):
            self._end()
            raise RewardError(f"{len(answers)} answers to {len(samples)} samples")
        return answers

    def close(self) -> None:
        """End the process and everything that it has started; the worker starts no other process."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        """End the process. On SIGTERM its keeper (`process_tree.py`) ends everything that the function has started."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            process.terminate()
        with suppress(subprocess.TimeoutExpired):  # the process may hang in a system call
            process.wait(_END_SECONDS)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        module_and_arguments = "meshwright.runtime.environment.worker_process", self._function, self._kind
        command = [sys.executable, "-m", *module_and_arguments, str(os.getpid())]
        try:
            process = self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        except (OSError, subprocess.SubprocessError, MemoryError) as error:
            raise RewardError(f"its process cannot be started: {printable_reason(error)}") from None
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        self._exchange(process, b"", IMPORT_SECONDS)  # the process answers, without a batch, once it has the function
        return process

    def _exchange(self, process: subprocess.Popen[bytes], line: bytes, seconds: float) -> list[Any]:
        """Send a line and wait for the answer; a process without a valid answer is killed."""
        try:
            message = json.loads(_answer(process, line, time.monotonic() + seconds))
            is_error = "error" in message
            answers = [] if is_error else list(message["answers"])
        except TimeoutError:
            self._end()
            raise RewardError(f"no answer within {seconds:g} s") from None
        except (OSError, ValueError, TypeError, KeyError, RecursionError, MemoryError):
            self._end()
            raise RewardError("its process ended without an answer") from None
        if is_error:
            raise RewardError(str(message["error"]))
        return answers


def _answer(process: subprocess.Popen[bytes], line: bytes, deadline: float) -> bytes:
    """Return the line with which a process answers. Raises TimeoutError, and OSError if the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    unsent, received = memoryview(line), bytearray()
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        if unsent:
            ready.register(process.stdin, selectors.EVENT_WRITE)
        while not received.endswith(b"\n"):
            events = ready.select(max(0.0, deadline - time.monotonic()))
            if not events:
                raise TimeoutError
            for key, _ in events:
                if key.fileobj is process.stdin:
                    unsent = unsent[os.write(process.stdin.fileno(), unsent) :]
                    if not unsent:
                        ready.unregister(process.stdin)
                    continue
                chunk = os.read(process.stdout.fileno(), _READ_BYTES)
                received += chunk
                if not chunk or len(received) > _MAX_ANSWER_BYTES:
                    raise OSError
    return bytes(received)
