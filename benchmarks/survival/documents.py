"""Mutated documents and checkpoints of every kind that a command reads, given to the commands in this process.

A command survives one when it ends in time with an exit code and without a traceback, and writes nowhere but where it
was asked to. Workers share the work; one that dies is replaced, and the file that it died of is a finding.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import torch.distributed as dist
import typer

from benchmarks.small_worlds import join_alone
from benchmarks.survival import hostile_world
from benchmarks.survival.hostile_world import OUT, Kind, Read
from benchmarks.survival.mutations import Content, Special, mutated
from meshwright.profiles.errors import BadInput, MeshwrightError
from meshwright.runtime.cli import main

MOST_SECONDS = 2.0
"""Of a processor, in which a command has told what is wrong."""
MOST_PLANNING_SECONDS = 20.0
"""In which a configuration of another trainer that was taken, of a larger job perhaps, is planned five times."""
_PATIENCE_SECONDS = 30.0
"""After which a command that takes none is said to wait."""
_MOST_BYTES = 6 * 2**30
"""Of memory, that a worker may ask for."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGES = {"os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "shutil.rmtree"}
_INSIDE = {"os.mkdir", "os.remove", "os.rmdir"}
_CODES = {0, 1, 2, 3, 4}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A file that was not survived: its kind, what read it, what happened, and where the file is kept."""

    kind: str
    read: str
    what: str
    kept: str = ""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """How many files of each kind were read, and what was found."""

    numbers: Counter[str]
    refused: Counter[str]
    findings: tuple[Finding, ...]

    @property
    def holds(self) -> bool:
        """Whether all were survived."""
        return not self.findings


def measure(world: Path, kept: Path, *, number: int, num_workers: int, seed: int = 0) -> Tried:
    """So many files in all, as many of each kind, in copies of the world that `hostile_world.write` made."""
    kept.mkdir(parents=True, exist_ok=True)
    names = [kind.name for kind in hostile_world.kinds(world)]
    parts = [Counter({name: len(range(place, number, len(names))) for place, name in enumerate(names)})]
    parts = [Counter({n: len(range(w, k, num_workers)) for n, k in parts[0].items()}) for w in range(num_workers)]
    with tempfile.TemporaryDirectory() as scratch, ThreadPool(num_workers) as pool:
        places = [Path(scratch) / str(worker) for worker in range(num_workers)]
        arguments = [
            (world, place, kept, part, seed * num_workers + n)
            for n, (place, part) in enumerate(zip(places, parts, strict=True))
        ]
        found = pool.starmap(_followed, arguments)
    return Tried(
        numbers=sum((one.numbers for one in found), Counter()),
        refused=sum((one.refused for one in found), Counter()),
        findings=tuple(finding for one in found for finding in one.findings),
    )


def _followed(world: Path, place: Path, kept: Path, shares: Counter[str], seed: int) -> Tried:
    """What a worker finds; one that dies, or says nothing for too long, is replaced."""
    left, read, refused, findings = shares.copy(), Counter[str](), Counter[str](), list[Finding]()
    context = multiprocessing.get_context("spawn")
    for life in itertools.count():
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(world, place)
        told, tell = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(place, kept, left.copy(), f"{seed}-{life}", tell))
        worker.start()
        tell.close()
        last, is_over = ("", "", ""), False
        with contextlib.suppress(EOFError):
            while told.poll(_PATIENCE_SECONDS * (1.5 if any(last) else 20)):
                what, value = told.recv()
                is_over = what == "over"
                if what in ("draws", "begins"):
                    last = value
                elif what == "finding":
                    findings.append(value)
                    print(value, flush=True)
                elif not is_over:
                    left[value] -= 1
                    read[value] += 1
                    refused[value] += what == "refused"
        if is_over:
            worker.join()
            return Tried(numbers=read, refused=refused, findings=tuple(findings))
        worker.kill()
        worker.join()
        kind, call, path = last
        left[kind] -= 1
        read[kind] += 1
        findings.append(Finding(kind=kind, read=call, what=f"the process ended with {worker.exitcode}", kept=path))
        print(findings[-1], flush=True)
    raise AssertionError("workers are replaced for as long as there is work")


def report(tried: Tried) -> str:
    """As a table of Markdown, and the findings."""
    rows = [f"| {name} | {number} | {tried.refused[name]} |" for name, number in tried.numbers.items()]
    total = f"{sum(tried.numbers.values())} files, {len(tried.findings)} not survived."
    found = [f"- {one.kind}: `{one.read}`: {one.what} ({one.kept})" for one in tried.findings]
    return "\n".join(
        (total, "", "| kind | files | refused |", "|---|---|---|", *rows, *([""] if found else []), *found)
    )


def _work(world: Path, kept: Path, shares: Counter[str], seed: str, tell: Any) -> None:
    """A worker: tells of every file that it begins with, of its end, and of what it found."""
    os.chdir(world)
    os.environ["HOME"] = tempfile.tempdir = str(world / OUT)
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reader, seen = Reader(world), set[tuple[str, str]]()
    with mock.patch.object(main, "app", typer.main.get_command(main.app)):
        for kind in hostile_world.kinds(world):
            good = (world / kind.path).read_bytes()
            tell.send(("draws", ("", "", "")))
            for read in kind.reads:  # what a command imports at its first call is no cost of a file
                reader.call(read)
            for number, content in enumerate(_drawn(kind, good, shares[kind.name], seed)):
                read = kind.reads[number % len(kind.reads)]
                path = _keep(kept, content, f"{kind.name}-{seed}-{number}")
                tell.send(("begins", (kind.name, _told(read), str(path))))
                _put(world / kind.path, content)
                refused, what = reader.call(read)
                if what and (kind.name, what) not in seen:
                    seen.add((kind.name, what))
                    tell.send(("finding", Finding(kind=kind.name, read=_told(read), what=what, kept=str(path))))
                else:
                    path.unlink()
                tell.send(("refused" if refused else "taken", kind.name))
            _put(world / kind.path, good)
    tell.send(("over", ""))


def _drawn(kind: Kind, good: bytes, number: int, seed: str) -> Iterator[Content]:
    """So many mutations of a good file, the same for the same seed."""
    found: list[Content] = []

    @hypothesis.seed(f"{seed} {kind.name}")
    @hypothesis.settings(
        max_examples=max(1, number),
        database=None,
        deadline=None,
        phases=(hypothesis.Phase.generate,),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(mutated(good, kind.form))
    def draw(content: Content) -> None:
        found.append(content)

    draw()
    yield from found[:number]


class Reader:
    """Calls what reads files, in this process, and says what went wrong."""

    def __init__(self, world: Path) -> None:
        self._world, self._writes, self._is_reading = world, set[str](), False
        sys.dont_write_bytecode = True  # the first call of a command compiles what it imports
        sys.addaudithook(self._audit)
        signal.signal(signal.SIGALRM, _hangs)

    def call(self, read: Read) -> tuple[bool, str]:
        """(whether the file was refused, what went wrong; empty where nothing did)."""
        out, err, code = io.StringIO(), io.StringIO(), 0
        self._writes.clear()
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE_SECONDS)
        before, wrong = time.process_time(), ""
        self._is_reading = True
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = _code(read, self._world)
        except BaseException as error:
            wrong = _raised(error)
        finally:
            self._is_reading = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        seconds = time.process_time() - before
        _clear(self._world / OUT)
        if not wrong and (code not in _CODES or "Traceback" in err.getvalue()):
            wrong = f"exit code {code}: {err.getvalue().strip()[-200:]}"
        plans = code == 0 and isinstance(read, tuple) and read[0] == "import"
        most = MOST_PLANNING_SECONDS if plans else MOST_SECONDS
        if not wrong and seconds > most:
            wrong = f"takes more than {most:g} s"
        if not wrong and self._writes:
            wrong = f"writes {', '.join(sorted(self._writes))}"
        return code != 0, wrong

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Notes what is written beside what was asked for."""
        if not self._is_reading:
            return
        if event in _INSIDE and arguments[-1] != -1:  # inside a directory that is removed, and was told of
            return
        path: Any = None
        flags = arguments[2] if event == "open" else 0
        if flags & _WRITING or event in _CHANGES:
            path = arguments[0]
        elif event in ("os.rename", "os.link", "os.symlink"):
            path = arguments[1]
        if isinstance(path, str | bytes | os.PathLike):
            where = os.path.abspath(os.fsdecode(path))
            # A directory is opened to see whether one may write there, and made if it is not there yet.
            changes_nothing = event in ("open", "os.mkdir") and os.path.isdir(where)
            if not changes_nothing and not where.startswith(
                (str(self._world / OUT), "/dev/null", "/proc/self", "/dev/shm")
            ):
                self._writes.add(f"{where} by {event}")


def _code(read: Read, world: Path) -> int:
    if not isinstance(read, tuple):
        hook = sys.excepthook  # joining puts another around it
        join_alone()
        try:
            return BadInput.exit_code if isinstance(read(world), str) else 0
        except MeshwrightError as error:
            return error.exit_code
        finally:
            dist.destroy_process_group()
            sys.excepthook = hook
    try:
        with mock.patch.object(sys, "argv", ["meshwright", *read]):
            main.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _raised(error: BaseException) -> str:
    """What was raised, and where in this program."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/benchmarks/" not in frame.filename]
    ours = [frame for frame in frames if "site-packages" not in frame.filename and "/lib/python" not in frame.filename]
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "elsewhere"
    return f"{type(error).__name__} at {where}: {str(error)[:150]}"


def _hangs(_signal: int, _frame: object) -> None:
    raise _HangsError(f"still there after {_PATIENCE_SECONDS:g} s")


class _HangsError(BaseException):
    """A call that does not end."""


def _told(read: Read) -> str:
    return " ".join(read) if isinstance(read, tuple) else "a rank"


def _put(path: Path, content: Content) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is Special.PIPE:
        os.mkfifo(path)
    elif content is Special.DIRECTORY:
        path.mkdir()
    elif content is Special.ENDLESS:
        path.symlink_to("/dev/zero")
    elif content is Special.CIRCLE:
        path.symlink_to(path.name)
    elif content is Special.SPARSE:
        with path.open("wb") as file:
            file.truncate(2**40)


def _keep(kept: Path, content: Content, name: str) -> Path:
    path = kept / name.replace(" ", "-").replace(":", "")
    path.write_bytes(content if isinstance(content, bytes) else content.value.encode())
    return path


def _clear(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
