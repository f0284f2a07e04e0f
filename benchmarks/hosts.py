"""Machines for runs of several nodes: this one twice, or two network namespaces joined by a cable of their own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Host:
    """An address, and the command that runs another command there."""

    address: str
    inside: tuple[str, ...] = ()

    def start(self, command: Sequence[object], **environment: str) -> Agent:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("GLOO_", "NCCL_"))}
        paths = {
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        return Agent(
            subprocess.Popen(
                [*self.inside, *map(str, command)],
                cwd=ROOT,
                env={**clean, **paths, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )


@dataclass(frozen=True)
class Agent:
    """A command at work on a host, with all that it has started."""

    process: subprocess.Popen[str]

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def end(self, seconds: float) -> End:
        """How it ends by itself within this time."""
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        return End(self.process.returncode, out, err)


@dataclass(frozen=True)
class End:
    code: int
    out: str
    err: str

    def sentence(self) -> str:
        """The one thing that was said of an error."""
        said = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(said) == 1, self.err
        assert "Traceback" not in self.err
        return said[0]


LOOPBACK = (Host("127.0.0.1"), Host("127.0.0.1"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def namespaces_refused() -> str:
    """Why this machine makes no network namespaces; empty where it does."""
    if shutil.which("ip") is None:
        return "there is no ip command (Debian's iproute2)"
    name = f"meshwright-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return tried.stderr.strip().splitlines()[-1]
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


@contextmanager
def two_namespaces() -> Iterator[tuple[Host, Host]]:
    """Two hosts with addresses of their own, which reach each other and nothing else."""
    names = [f"meshwright-{os.getpid()}-{place}" for place in "ab"]
    addresses = ("10.213.0.1", "10.213.0.2")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for link in ("cable", "lo"):
                _ip("-n", name, "link", "set", link, "up")
        first, second = (Host(a, ("ip", "netns", "exec", name)) for name, a in zip(names, addresses, strict=True))
        yield first, second
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
