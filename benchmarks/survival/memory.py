"""A long run of the smallest job: memory, threads and open files of every rank stay as they were once it was warm."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.survival.job import Case, planned, write_job, write_models
from benchmarks.survival.kills import learned, ranks_of, start
from meshwright.planner.plan.plan import write_plan

CASE = Case(name="smallest", num_ranks=2, pins=("actor_train.layout=dp2", "critic_train.layout=pp2"))
WARM = 300
"""Steps after which nothing may grow."""
MOST_GROWTH = 0.02
"""Of the memory that a rank has by then."""
_EVERY_SECONDS = 2.0
_NEAR = 50
"""Steps that are looked at together."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a rank holds when the run has recorded so many steps."""

    steps: int
    resident_bytes: int
    num_threads: int
    num_files: int


@dataclass(frozen=True, kw_only=True)
class Held:
    """Medians of a rank about step `WARM` and at the end."""

    rank: int
    before: Sample
    after: Sample

    @property
    def growth(self) -> float:
        """Of memory, as a fraction."""
        return self.after.resident_bytes / self.before.resident_bytes - 1.0

    @property
    def holds(self) -> bool:
        """Whether memory stays within the bar, and threads and files as they were."""
        same = (self.after.num_threads, self.after.num_files) == (self.before.num_threads, self.before.num_files)
        return same and self.growth < MOST_GROWTH


def measure(scratch: Path, *, steps: int) -> list[Held]:
    """Of every rank of one run. Raises RuntimeError where the run fails, or ends before `WARM` steps."""
    write_models(scratch, hidden_size=16)
    job = write_job(scratch, CASE)
    write_plan(scratch / f"{CASE.name}.json", planned(job, CASE.pins)[1])
    out = scratch / "run"
    process = start(scratch, CASE, out, steps, 0, checkpoint_every=WARM // 2)
    samples = defaultdict[int, list[Sample]](list)
    while process.poll() is None:
        reached = len(learned(out))
        for rank, one in enumerate(sorted(ranks_of(process.pid), key=lambda one: one.pid)):
            with suppress(psutil.Error, FileNotFoundError):
                samples[rank].append(_sample(one, reached))
        time.sleep(_EVERY_SECONDS)
    if process.returncode or steps <= WARM:
        raise RuntimeError((out / "said").read_text())
    return [held(rank, samples[rank]) for rank in range(CASE.num_ranks)]


def held(rank: int, samples: list[Sample]) -> Held:
    """What the samples of a rank say."""
    last = max(one.steps for one in samples)
    return Held(rank=rank, before=_about(WARM, samples), after=_about(last, samples))


def report(found: list[Held]) -> str:
    """As a table of Markdown."""
    rows = [
        f"| {one.rank} | {one.before.resident_bytes / 2**20:.1f} | {one.after.resident_bytes / 2**20:.1f} | "
        f"{one.growth:+.2%} | {one.before.num_threads}, {one.after.num_threads} | "
        f"{one.before.num_files}, {one.after.num_files} | {one.after.steps} |"
        for one in found
    ]
    head = f"| rank | MiB at step {WARM} | MiB at the end | growth | threads | open files | steps |"
    return "\n".join((head, "|---|---|---|---|---|---|---|", *rows))


def _about(steps: int, samples: list[Sample]) -> Sample:
    near = [one for one in samples if abs(one.steps - steps) <= _NEAR]
    return Sample(
        steps=steps,
        resident_bytes=round(statistics.median(one.resident_bytes for one in near)),
        num_threads=round(statistics.median(one.num_threads for one in near)),
        num_files=round(statistics.median(one.num_files for one in near)),
    )


def _sample(rank: psutil.Process, steps: int) -> Sample:
    return Sample(
        steps=steps,
        resident_bytes=rank.memory_info().rss,
        num_threads=rank.num_threads(),
        num_files=rank.num_fds(),
    )
