"""What a checkpoint behind every step costs: steps without one, with one that is waited for, and with one beside."""

from __future__ import annotations

import shutil
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.survival.job import Case, request_of, write_models
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.run import RankRun
from meshwright.runtime.launch.launch import ProcessSetup, launch

CASE = Case(name="saves", num_ranks=2, pins=("actor_train.layout=dp2", "critic_train.layout=dp2"))
HOWS = ("no checkpoint", "waited for", "beside training")


class Cost(NamedTuple):
    """Of one way: seconds of a step, median and slowest tenth, and bytes of a checkpoint."""

    how: str
    median_seconds: float
    slow_seconds: float
    num_bytes: int


def measure(scratch: Path, *, steps: int, repeats: int, hidden_size: int) -> list[Cost]:
    """Runs in turns, of each way as many as there are repeats; the first two steps of a run are left out."""
    models = scratch / "models"
    write_models(models, hidden_size=hidden_size)
    seconds: dict[str, list[float]] = {how: [] for how in HOWS}
    num_bytes = dict.fromkeys(HOWS, 0)
    for _ in range(repeats):
        for how in HOWS:
            run = request_of(models, CASE, scratch / "run", steps)
            run.out.mkdir()
            of_ranks = launch(_seconds_of_steps, run, how, num_ranks=2, setup=ProcessSetup("cpu"))
            seconds[how] += of_ranks[0][2:]
            saved = sorted((run.out / "checkpoints").glob("step-*"))
            num_bytes[how] = sum(path.stat().st_size for path in saved[-1].iterdir()) if saved else 0
            shutil.rmtree(run.out)
    return [
        Cost(how, statistics.median(of), statistics.quantiles(of, n=10)[-1], num_bytes[how])
        for how, of in seconds.items()
    ]


def report(found: list[Cost]) -> str:
    """As a table of Markdown, with what a way adds to a step."""
    base = found[0].median_seconds
    rows = [
        f"| {one.how} | {one.median_seconds:.3f} | {one.median_seconds - base:+.3f} | {one.slow_seconds:.3f} | "
        f"{one.num_bytes / 1e6:.0f} |"
        for one in found
    ]
    head = ("| checkpoint behind every step | s a step | more s | s, slowest tenth | MB |", "|---|---|---|---|---|")
    return "\n".join((*head, *rows))


def _seconds_of_steps(request: RunRequest, how: str) -> list[float]:
    """On one rank; what is still on its way at the end is waited for, and not counted."""
    run, seconds = RankRun(request), []
    run.recorder.open(0)
    for turn in run.periods:
        start = time.perf_counter()
        run.run_period(turn)
        if how != HOWS[0]:
            run.save(turn + 1)
        if how == HOWS[1]:
            run.wait_for_checkpoint(turn + 1)
        seconds.append(time.perf_counter() - start)
    run.finish()
    run.close()
    return seconds
