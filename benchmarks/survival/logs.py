"""Readers of a run whose trace has grown long: seconds and peak memory of each, beside those on the short run.

A run of the smallest job is made as if it had trained for as many earlier steps as fill the trace. Their spans and
metrics are copies of those that it recorded, under negative steps, so that its checkpoint and its last steps stay as
they are; the newest segment is almost full, as it is at worst.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.survival.job import Case, planned, write_job, write_models
from benchmarks.survival.kills import start
from meshwright.planner.plan.plan import write_plan
from meshwright.profiles.run_logs import SEGMENT_BYTES, append_lines, log_files, read_log_lines

CASE = Case(name="long", num_ranks=2, pins=("actor_train.layout=dp2", "critic_train.layout=pp2"))
STEPS = 4
"""Steps that the run trains before its trace is made long."""

FIRST_STEP = -9_999_999
"""The first of the earlier steps, which all have as many digits, so that their lines are equally long."""

MOST_BYTES = 300 * 2**20
"""Peak memory that a long trace may add to a reader."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One command: its exit code, its seconds, and the peak resident memory of its largest process."""

    code: int
    seconds: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A command on the short run and on the long one."""

    name: str
    short: Reading
    long: Reading

    @property
    def added_bytes(self) -> int:
        """Peak memory that the length of the trace adds."""
        return self.long.peak_bytes - self.short.peak_bytes

    @property
    def holds(self) -> bool:
        """True if the long run is read, in little more memory than the short one."""
        return self.long.code == self.short.code == 0 and self.added_bytes <= MOST_BYTES


@dataclass(frozen=True, kw_only=True)
class LongLog:
    """The size of a trace that was made long, and its readers."""

    trace_bytes: int
    file_bytes: int
    num_steps: int
    readers: tuple[Reader, ...]

    @property
    def holds(self) -> bool:
        """True if every reader holds."""
        return all(reader.holds for reader in self.readers)


def measure(scratch: Path, *, trace_bytes: int) -> LongLog:
    """Time each reader on a short run and on its copy with about `trace_bytes` of trace.

    Raises RuntimeError if the short run fails.
    """
    write_models(scratch, hidden_size=16)
    job = write_job(scratch, CASE)
    write_plan(scratch / f"{CASE.name}.json", planned(job, CASE.pins)[1])
    short, long = scratch / "short", scratch / "longer"
    if start(scratch, CASE, short, STEPS, 0).wait():
        raise RuntimeError((short / "said").read_text())
    shutil.copytree(short, long)
    num_steps, files = lengthen(long, trace_bytes), log_files(long / "trace.jsonl")
    file_bytes = sum(file.stat().st_size for file in files)
    readers = []
    for name, command in _commands(job).items():
        before, after = (_read(command(out), scratch) for out in (short, long))
        readers.append(Reader(name=name, short=before, long=after))
    return LongLog(trace_bytes=trace_bytes, file_bytes=file_bytes, num_steps=num_steps, readers=tuple(readers))


def lengthen(out: Path, trace_bytes: int, *, segment_bytes: int = SEGMENT_BYTES) -> int:
    """Put earlier steps before those of a run, so that its trace has about `trace_bytes`; return their number."""
    trace, metrics = out / "trace.jsonl", out / "metrics.jsonl"
    spans, lines = ([line.text.decode() for line in read_log_lines(*log_files(path))] for path in (trace, metrics))
    for file in (*log_files(trace), *log_files(metrics)):
        file.unlink()
    period = [span for span in spans if json.loads(span)["step"] == STEPS - 1]
    period_bytes = sum(len(_at_step(span, FIRST_STEP)) for span in period)
    segment_steps = math.ceil(segment_bytes / period_bytes)
    last_steps = segment_steps - 1 - math.ceil(sum(map(len, spans)) / period_bytes)
    num_steps = trace_bytes // (segment_steps * period_bytes) * segment_steps + last_steps
    steps = range(FIRST_STEP, FIRST_STEP + num_steps)
    for step in steps:
        append_lines(trace, (_at_step(span, step) for span in period), segment_bytes=segment_bytes)
    append_lines(metrics, (_at_step(lines[-1], step) for step in steps), segment_bytes=sys.maxsize)
    append_lines(trace, spans, segment_bytes=segment_bytes)
    append_lines(metrics, lines, segment_bytes=sys.maxsize)
    return num_steps


def report(found: LongLog) -> str:
    """The readers as a table of Markdown."""
    head = (
        f"A trace of {found.trace_bytes / 2**30:.2f} GiB in {found.num_steps + STEPS} steps, "
        f"{found.file_bytes / 2**20:.0f} MiB on disk; peak memory is that of the largest process of the command.\n\n"
        "| command | s, short run | MiB, short run | s, long run | MiB, long run | MiB added | holds |\n"
        "|---|---|---|---|---|---|---|"
    )
    rows = [
        f"| {one.name} | {one.short.seconds:.1f} | {one.short.peak_bytes / 2**20:.0f} | {one.long.seconds:.1f} | "
        f"{one.long.peak_bytes / 2**20:.0f} | {one.added_bytes / 2**20:.0f} | {'yes' if one.holds else 'NO'} |"
        for one in found.readers
    ]
    return "\n".join((head, *rows))


_STEP = re.compile(r'"step": -?[0-9]+')


def _at_step(line: str, step: int) -> str:
    return _STEP.sub(f'"step": {step}', line, count=1)


def _commands(job: Path) -> dict[str, Callable[[Path], list[str]]]:
    """The readers, as the arguments of a command for the directory of a run; the last one adds steps to it."""
    plan = str(job.with_suffix(".json"))
    table, page, other = (str(job.with_name(name)) for name in ("corrected.json", "report.html", "replanned.json"))
    resumed = ["--steps", str(STEPS + 2), "--resume"]
    return {
        "watch": lambda out: ["watch", str(out), "--once"],
        "report": lambda out: ["report", plan, str(out), "-o", page],
        "calibrate": lambda out: ["calibrate", plan, str(out), "-o", f"{table}.{out.name}"],
        "replan": lambda out: ["replan", plan, str(out), "-o", other],
        "plan --from-trace": lambda out: ["plan", str(job), "--from-trace", str(out), "-o", other],
        "run --resume, and its summary": lambda out: ["run", plan, str(job), "--out", str(out), *resumed],
    }


def _read(arguments: Sequence[str], scratch: Path) -> Reading:
    program, begin = str(Path(sys.executable).with_name("meshwright")), time.monotonic()
    peaks: dict[int, int] = {}
    with (scratch / "said").open("wb") as said:
        process = subprocess.Popen([program, *arguments], stdout=said, stderr=said, cwd=scratch)
        while process.poll() is None:
            with suppress(psutil.Error):
                for one in (command := psutil.Process(process.pid), *command.children(recursive=True)):
                    peaks[one.pid] = max(_peak_bytes(one.pid), peaks.get(one.pid, 0))
            time.sleep(_EVERY_SECONDS)
    if process.returncode:
        print(" ".join(arguments), (scratch / "said").read_text(errors="replace"), sep="\n", file=sys.stderr)
    seconds = time.monotonic() - begin
    return Reading(code=process.returncode, seconds=seconds, peak_bytes=max(peaks.values(), default=0))


_EVERY_SECONDS = 0.1


def _peak_bytes(pid: int) -> int:
    """Return the peak resident set of a process so far; 0 if it has ended.

    The maximum of `resource` is of no use here: a child inherits that of this process, which has loaded torch.
    """
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 2**10
    return 0
