"""Ranks that are killed at seeded moments: every run ends, learns what an undisturbed one does, and loses little.

A moment is some seconds behind so many steps since the ranks were started: it falls into any stage, refit, hand-over
and save, and where no step is waited for into the start of what was started again.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.survival.job import Case, planned, write_job, write_models
from meshwright.planner.plan.plan import write_plan

_TRAINING = ("actor_train", "actor_logprob", "critic_train", "critic_value", "ref_logprob")
APART = (
    *(f"{stage}.pool=0:1" for stage in ("actor_generate", "reward_score")),
    *(f"{stage}.pool=1:1" for stage in _TRAINING),
)
"""Generation and scores on one rank, training on the other."""
CASES = (
    Case(name="synchronous", num_ranks=2, pins=("actor_train.layout=dp2", "critic_train.layout=pp2")),
    Case(name="staleness 2", num_ranks=2, pins=(*APART, "actor_generate.batches_in_flight=2"), staleness=2),
)
INTERVAL = 2
"""Steps between checkpoints."""
_MOST_STEPS, _MOST_SECONDS = 4, 2.0
"""From when all ranks are there to a kill."""
_TIMES = {"seconds", "tokens_per_second", "overhead"}


@dataclass(frozen=True, kw_only=True)
class Survived:
    """One run: ranks killed in it, its exit code, restarts and steps lost, and whether it learned the same."""

    case: str
    num_kills: int
    code: int
    lost: tuple[int, ...]
    is_equal: bool

    @property
    def holds(self) -> bool:
        """Whether it came to its end as an undisturbed run does, and never lost more than an interval."""
        return self.code == 0 and self.is_equal and max(self.lost, default=0) <= INTERVAL


def measure(scratch: Path, *, num_kills: int, kills_per_run: int, steps: int, seed: int = 0) -> list[Survived]:
    """So many kills in all, half of them in each case: runs that end before all of theirs are followed by others."""
    write_models(scratch)
    found = []
    for case in CASES:
        job = write_job(scratch, case)
        write_plan(scratch / f"{case.name}.json", planned(job, case.pins)[1])
        whole = scratch / f"{case.name} whole"
        assert start(scratch, case, whole, steps, 0).wait() == 0, (whole / "said").read_text()
        left, number = num_kills // 2, 0
        while left > 0:
            draw = random.Random(f"{seed}/{case.name}/{number}")
            out = scratch / f"{case.name} {number}"
            process = start(scratch, case, out, steps, kills_per_run)
            most = min(kills_per_run, left)
            moments = [(draw.randint(0, _MOST_STEPS), draw.uniform(0.0, _MOST_SECONDS)) for _ in range(most)]
            killed = _killed(process, case, out, moments, draw)
            found.append(_survived(case, out, process.wait(), killed, is_equal=learned(out) == learned(whole)))
            left, number = left - killed, number + 1
            print(found[-1], "" if found[-1].holds else (out / "said").read_text(), flush=True)
    return found


def report(found: list[Survived]) -> str:
    """As a table of Markdown."""
    rows = []
    for case in CASES:
        of = [one for one in found if one.case == case.name]
        lost = [steps for one in of for steps in one.lost]
        rows.append(
            f"| {case.name} | {sum(one.num_kills for one in of)} | {len(of)} | {sum(one.code == 0 for one in of)} | "
            f"{sum(one.is_equal for one in of)} | {len(lost)} | {sum(steps > INTERVAL for steps in lost)} | "
            f"{max(lost, default=0)} |"
        )
    head = (
        "| case | kills | runs | ended by themselves | learned the same, bit for bit | restarts | "
        f"that lost more than {INTERVAL} steps | most steps lost |"
    )
    return "\n".join((head, "|---|---|---|---|---|---|---|---|", *rows))


def _killed(
    process: subprocess.Popen[bytes], case: Case, out: Path, moments: Sequence[tuple[int, float]], draw: random.Random
) -> int:
    """Kills one of the ranks so many steps and seconds after all are there, and again when all are there again; how
    often."""
    killed, gone = 0, set[int]()
    while process.poll() is None and killed < len(moments):
        ranks = [one for one in ranks_of(process.pid) if one.pid not in gone]
        if len(ranks) < case.num_ranks:
            time.sleep(0.02)
            continue
        steps, seconds = moments[killed]
        before = len(learned(out))
        while process.poll() is None and len(learned(out)) < before + steps:
            time.sleep(0.02)
        time.sleep(seconds)
        gone |= {one.pid for one in ranks}
        with suppress(psutil.NoSuchProcess):  # the run has come to its end meanwhile
            draw.choice(ranks).kill()
            killed += 1
    return killed


def _survived(case: Case, out: Path, code: int, killed: int, *, is_equal: bool) -> Survived:
    summary = out / "summary.json"
    restarts = json.loads(summary.read_text())["restarts"] if summary.exists() else []
    lost = tuple(max(0, one["reached"] - one["saved"]) for one in restarts)
    return Survived(case=case.name, num_kills=killed, code=code, lost=lost, is_equal=is_equal)


def start(
    scratch: Path, case: Case, out: Path, steps: int, max_restarts: int, *, checkpoint_every: int = INTERVAL
) -> subprocess.Popen[bytes]:
    """A run of the case's plan, which says into a file in its directory what the command prints."""
    program = str(Path(sys.executable).with_name("meshwright"))
    files = [str(scratch / f"{case.name}.json"), str(scratch / f"{case.name}.yaml")]
    options = ["--checkpoint-every", str(checkpoint_every), "--max-restarts", str(max_restarts), "--out", str(out)]
    out.mkdir()
    with (out / "said").open("wb") as said:
        return subprocess.Popen(
            [program, "run", *files, "--steps", str(steps), *options], stdout=said, stderr=said, cwd=scratch
        )


def ranks_of(launcher: int) -> list[psutil.Process]:
    """The processes that compute: those which a process that the launcher started has forked."""
    try:
        found = psutil.Process(launcher).children(recursive=True)
        return [process for process in found if process.ppid() not in (0, launcher)]
    except psutil.NoSuchProcess:
        return []


def learned(out: Path) -> list[dict[str, Any]]:
    """What a run has recorded of each step, without what the clock says."""
    path = out / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
    return [{name: value for name, value in line.items() if name not in _TIMES} for line in lines]
