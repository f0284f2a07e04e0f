"""Real ranks for tests: processes joined by gloo, started once and given one function after another.

`run_on_ranks(4, function, *args)` calls `function(*args)` on four ranks and returns what each returned. The function
must be importable, which those at the top level of a test module are. Processes outlive a call; if one of them fails,
all are ended and the next call starts others.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from meshwright.runtime.device import host

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
_SLOW = ("meshwright.runtime.execution.train", "pytest", "tests.runtime.checkpoints")
"""What nearly every test of ranks imports, and what that imports."""

_POOLS: dict[int, _Pool] = {}


class RankError(AssertionError):
    """A rank raised, ended or took too long; the message has its traceback."""


def run_on_ranks(world_size: int, function: Callable[..., T], *args: Any, timeout: float = 120.0) -> list[T]:
    """What `function(*args)` returned on each of `world_size` ranks; `timeout` in seconds."""
    if world_size not in _POOLS:
        _POOLS[world_size] = _Pool(_server(), world_size)
    pool = _POOLS[world_size]
    try:
        return pool.run(function, args, timeout)
    except BaseException:
        _POOLS.pop(world_size).close()
        raise


def run_on_new_ranks(world_size: int, function: Callable[..., T], *args: Any, timeout: float = 120.0) -> list[T]:
    """As `run_on_ranks`, on processes that have run nothing before: groups of a mesh are kept by those that have."""
    pool = _Pool(_server(), world_size)
    try:
        return pool.run(function, args, timeout)
    finally:
        pool.close()


@functools.cache
def _server() -> _Server:
    server = _Server()
    atexit.register(server.close)
    return server


@atexit.register
def _close_all() -> None:
    for pool in _POOLS.values():
        pool.close()


def _paths() -> list[str]:
    """Directories of modules: this project's, and those of this process's own environment."""
    return [str(ROOT / "src"), str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


class _Server:
    """A process that has imported everything slow and forks the ranks of every world from itself."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.ranks"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_paths()), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def fork(self, directory: Path, world_size: int) -> int:
        """The process group of a new world."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{world_size} {directory}\n")
        self._process.stdin.flush()
        if not (leader := self._process.stdout.readline()):
            raise RankError(f"no ranks can be started\n{self._process.communicate()[1]}")
        return int(leader)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class _Pool:
    """The processes of one world. They are told of work by a line with a path, and answer in files beside it."""

    def __init__(self, server: _Server, world_size: int) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="meshwright-ranks-", ignore_cleanup_errors=True)
        self._directory = Path(self._scratch.name)
        self._calls = 0
        for rank in range(world_size):
            os.mkfifo(self._directory / f"calls.{rank}")
        # Opened for reading too, so that opening does not wait for the rank; it is only ever written.
        self._to_ranks = [os.open(self._directory / f"calls.{rank}", os.O_RDWR) for rank in range(world_size)]
        self._leader = server.fork(self._directory, world_size)

    def run(self, function: Callable[..., T], args: tuple[Any, ...], timeout: float) -> list[T]:
        self._calls += 1
        request = self._directory / f"call.{self._calls}"
        request.write_bytes(pickle.dumps((function, args)))
        for descriptor in self._to_ranks:
            os.write(descriptor, f"{request}\n".encode())
        deadline = time.monotonic() + timeout
        answers = [request.with_name(f"{request.name}.answer.{rank}") for rank in range(len(self._to_ranks))]
        while not all(answer.exists() for answer in answers):
            self._check(answers, deadline)
            time.sleep(0.005)
        self._check(answers, deadline)
        return [pickle.loads(answer.read_bytes())[1] for answer in answers]

    def _check(self, answers: list[Path], deadline: float) -> None:
        """Raises RankError if a rank has failed, if one has ended, or if time is up."""
        for rank, answer in enumerate(answers):
            if answer.exists():
                error, _ = pickle.loads(answer.read_bytes())
                if error:
                    raise RankError(f"rank {rank} failed\n{error}")
        if (ended := self._directory / "ended").exists():
            raise RankError(f"a rank ended with exit code {ended.read_text()}\n{self._output()}")
        if time.monotonic() > deadline:
            silent = [rank for rank, answer in enumerate(answers) if not answer.exists()]
            os.killpg(self._leader, signal.SIGUSR1)  # all say where they are
            time.sleep(0.5)
            raise RankError(f"no answer in time from ranks {silent}\n{self._output()}")

    def _output(self) -> str:
        return (self._directory / "output").read_text(errors="replace")[-8000:]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # they have ended
            os.killpg(self._leader, signal.SIGKILL)
        for descriptor in self._to_ranks:
            os.close(descriptor)
        self._scratch.cleanup()


def _fork_worlds() -> None:
    """What the server does: forks a world for each line it reads, which answers with its process group."""
    host.install()
    for module in _SLOW:
        importlib.import_module(module)
    warnings.simplefilter("error", append=True)  # as in the test session, after what the runtime knows of
    torch.set_num_threads(1)
    gc.freeze()  # what is shared with the ranks is not to be copied for each
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a world ended
    for line in sys.stdin:
        world_size, directory = line.split(maxsplit=1)
        if os.fork() == 0:
            _lead(Path(directory.strip()), int(world_size))


def _lead(directory: Path, world_size: int) -> NoReturn:
    """What a world's first process does: fork the ranks, and say how the first to end ended."""
    os.setpgid(0, 0)
    sys.stdout.write(f"{os.getpid()}\n")
    sys.stdout.flush()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    with (directory / "output").open("wb") as output, open(os.devnull, "rb") as nothing:
        for descriptor, file in enumerate((nothing, output, output)):
            os.dup2(file.fileno(), descriptor)
    for rank in range(world_size):
        if os.fork() == 0:
            _serve(directory, rank, world_size)
            os._exit(0)
    _, status = os.wait()
    (directory / "ended").write_text(str(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _serve(directory: Path, rank: int, world_size: int) -> None:
    """What each rank does: join the world, then one call per line until the lines end."""
    faulthandler.enable()  # one that breaks down says where it was
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=world_size)
    for line in (directory / f"calls.{rank}").open():
        request = Path(line.strip())
        error, result = "", None
        try:
            function, args = pickle.loads(request.read_bytes())
            result = function(*args)
        except BaseException:
            error = traceback.format_exc()
        partial = request.with_name(f"{request.name}.partial.{rank}")
        partial.write_bytes(pickle.dumps((error, result)))
        partial.rename(request.with_name(f"{request.name}.answer.{rank}"))  # a file that exists is whole


if __name__ == "__main__":
    _fork_worlds()
