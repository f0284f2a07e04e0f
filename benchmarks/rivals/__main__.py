"""Whole PPO steps of this machine beside those of TRL: response tokens a second, of the same models, prompts, lengths.

    python -m benchmarks.rivals --out build/rivals [--pairs 3] [--steps 6]

Under `--out` TRL gets an environment of its own, from `requirements.txt` (1.5 GB for a CPU); the report is left
there too. Both sides have two cores: ours two ranks of one thread, TRL what it is fastest with when it has been tried
once with each of `WAYS`. They run in turns: a pair is one run of each, and a figure is the median over the pairs.
Processor time is told beside the time of the wall, which other work on the same cores stretches.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch
import transformers

from benchmarks.end_to_end.__main__ import RAMP, best_of, steady_steps
from benchmarks.rivals.environment import REQUIREMENTS, pins, python_of, run_in
from benchmarks.rivals.jobs import LENGTHS, STALENESS, Shared, shared
from benchmarks.rivals.processor import watched
from meshwright.planner.job.job import read_job, resolve
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.errors import BadInput
from meshwright.profiles.table import Table, read_table

WARM = 1
"""Steps of TRL that are left out at the start of every run."""

TRL_PPO = Path(__file__).with_name("trl_ppo.py")


@dataclass(frozen=True)
class Way:
    """How TRL is started."""

    processes: int
    threads: int

    @property
    def name(self) -> str:
        return f"TRL, processes x threads {self.processes} x {self.threads}"


WAYS = (Way(1, 1), Way(1, 2), Way(2, 1))


@dataclass(frozen=True)
class Step:
    """Wall time of a step, and the response tokens learnt from in it."""

    seconds: float
    response_tokens: float


@dataclass(frozen=True)
class Run:
    """The counted steps of one run of a side, and the processor time of all its processes over them."""

    steps: Sequence[Step]
    processor_seconds: float

    @property
    def tokens(self) -> float:
        return sum(step.response_tokens for step in self.steps)

    @property
    def rate(self) -> float:
        """Response tokens a second."""
        return self.tokens / sum(step.seconds for step in self.steps)

    @property
    def processor_rate(self) -> float:
        """Response tokens a second of processor time."""
        return self.tokens / self.processor_seconds


Side = Callable[[Path], Run]
"""One run, given its directory."""


@dataclass(frozen=True)
class Found:
    """Of one job: TRL tried in every way, and the runs of every side, pair by pair."""

    tried: Mapping[str, Run]
    runs: Mapping[str, Sequence[Run]]


def main() -> int:
    """The exit code: 0, or 2 for what cannot be measured here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where TRL's environment, the runs and the report go")
    parser.add_argument("--lengths", choices=LENGTHS, action="append", help="one or more; all by default")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="that are counted of every run")
    asked = parser.parse_args()
    try:
        python = python_of(asked.out / "trl")
        found = {name: _measured(name, python, asked) for name in asked.lengths or LENGTHS}
    except BadInput as problem:
        print(f"error: {problem}", file=sys.stderr)
        return problem.exit_code
    text = report(found, asked.pairs, asked.steps)
    print(text)
    (asked.out / "report.md").write_text(text, encoding="utf-8")
    return 0


def _measured(name: str, python: Path, asked: argparse.Namespace) -> Found:
    """All runs of one job."""
    job = shared(name, asked.out / name)
    table = _profile(job)
    ways: dict[str, Side] = {way.name: partial(_trl, job, python, way, asked.steps) for way in WAYS}
    tried = {way: _told(name, way, run(asked.out / name / way)) for way, run in ways.items()}
    fastest = max(tried, key=lambda way: tried[way].rate)
    sides = {fastest: ways[fastest], **_our_sides(job, table, asked.steps)}
    runs: dict[str, list[Run]] = {side: [] for side in sides}
    for pair in range(asked.pairs):
        for side, run in sides.items():
            runs[side].append(_told(name, side, run(asked.out / name / f"{side}, pair {pair}")))
    if "fixed" in LENGTHS[name]:
        _require_length(runs, LENGTHS[name]["fixed"] * job.job["workload"]["batch_size"])
    return Found(tried, runs)


def _told(name: str, side: str, run: Run) -> Run:
    told = f"{run.rate:.0f} tokens/s, {run.processor_rate:.0f} a second of processor time"
    print(f"{name}: {side}: {told}", file=sys.stderr, flush=True)
    return run


def _profile(job: Shared) -> Table:
    path = job.path.with_name("table.json")
    if not path.exists():
        command = Path(sys.executable).with_name("meshwright")
        subprocess.run([command, "profile", job.path, "-o", path], check=True)
    return read_table(path)


def _our_sides(job: Shared, table: Table, steps: int) -> Mapping[str, Side]:
    """The best plan that waits for every update, as TRL does, and the best one that may work ahead."""
    facts = resolve(read_job(job.path), job.path.parent)
    fresh = best_of(facts.model_copy(update={"staleness": 0}), cost_model_of(facts, table))
    ahead = best_of(facts, cost_model_of(facts, table))
    return {
        "ours, synchronous": partial(_ours, job, fresh, steps),
        f"ours, staleness {STALENESS}": partial(_ours, job, ahead, steps),
    }


def _ours(job: Shared, plan: Plan, steps: int, out: Path) -> Run:
    metrics = out / "metrics.jsonl"
    with watched(metrics) as spent:
        lines = steady_steps(plan, read_job(job.path), job.path.parent, out, steps + RAMP)
    found = [Step(line["seconds"], line["response_tokens"] * plan.facts.workload.batch_size) for line in lines]
    last = len(metrics.read_text(encoding="utf-8").splitlines()) - RAMP
    return Run(found, spent.seconds(last - len(found), last))


def _trl(job: Shared, python: Path, way: Way, steps: int, out: Path) -> Run:
    out.mkdir(parents=True)
    settings = out / "settings.json"
    settings.write_text(json.dumps(job.for_trl(steps=WARM + steps, threads=way.threads)), encoding="utf-8")
    many = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={way.processes}")
    launch = many if way.processes > 1 else ()
    # Threads that wait must not spin: others may work on the same cores.
    threads = {"OMP_NUM_THREADS": str(way.threads), "OMP_WAIT_POLICY": "passive"}
    with watched(out / "rank0.jsonl") as spent:
        run_in(python, *launch, TRL_PPO, settings, ACCELERATE_USE_CPU="true", **threads)
    found = merged([_lines(out / f"rank{rank}.jsonl") for rank in range(way.processes)])
    return Run(found[WARM:], spent.seconds(WARM, len(found)))


def _lines(path: Path) -> list[Step]:
    return [Step(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def merged(ranks: Sequence[Sequence[Step]]) -> list[Step]:
    """Steps of all ranks together: as long as the slowest one took, with the tokens of all."""
    return [
        Step(max(one.seconds for one in step), sum(one.response_tokens for one in step))
        for step in zip(*ranks, strict=True)
    ]


def _require_length(runs: Mapping[str, Sequence[Run]], tokens: int) -> None:
    """Raises BadInput unless every step of every side has so many response tokens."""
    for side, of_side in runs.items():
        for step in (step for run in of_side for step in run.steps):
            if step.response_tokens != tokens:
                raise BadInput(f"{side}: a step has {step.response_tokens:.0f} response tokens, not {tokens}.")


def report(found: Mapping[str, Found], pairs: int, steps: int) -> str:
    """A table a job; ratios are medians of the pairs' ratios."""
    theirs = ", ".join(f"{name} {release}" for name, release in pins(REQUIREMENTS.read_text(encoding="utf-8")).items())
    load = " ".join(f"{one:.1f}" for one in psutil.getloadavg())
    lines = [
        "# Whole PPO steps: response tokens per second, TRL and ours",
        "",
        f"Measured on {psutil.cpu_count()} shared cores, {datetime.date.today()}: `python -m benchmarks.rivals --pairs "
        f"{pairs} --steps {steps}`. Medians of {pairs} paired runs. Load of the machine at the end, over 1, 5 and 15 "
        f"minutes: {load}.",
        "",
        f"TRL's environment: {theirs}. Ours: torch {torch.__version__}, transformers "
        f"{transformers.__version__}. Python {platform.python_version()} for both.",
    ]
    for name, one in found.items():
        tried = ", ".join(f"{run.rate:.0f} and {run.processor_rate:.0f} ({way})" for way, run in one.tried.items())
        lines += ["", f"## {name}: response lengths {json.dumps(LENGTHS[name])}", "", *_table(one.runs)]
        lines += ["", f"TRL in one run of each way, tokens/s and tokens a second of processor time: {tried}."]
    return "\n".join(lines) + "\n"


def _table(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """A row a side; the first is what the others are compared with."""
    first = next(iter(runs.values()))
    lines = [
        "| side | tokens/s | of the first | tokens per s of processor time | of the first | step s | tokens a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for side, of_side in runs.items():
        steps = [step for run in of_side for step in run.steps]
        cells = [
            f"{statistics.median(run.rate for run in of_side):.0f}",
            _ratios([mine.rate / theirs.rate for mine, theirs in zip(of_side, first, strict=True)]),
            f"{statistics.median(run.processor_rate for run in of_side):.0f}",
            _ratios([mine.processor_rate / theirs.processor_rate for mine, theirs in zip(of_side, first, strict=True)]),
            f"{statistics.median(step.seconds for step in steps):.2f}",
            f"{statistics.fmean(step.response_tokens for step in steps):.0f}",
        ]
        lines.append(f"| {side} | {' | '.join(cells)} |")
    return lines


def _ratios(found: Sequence[float]) -> str:
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


if __name__ == "__main__":
    sys.exit(main())
