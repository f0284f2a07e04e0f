"""How the time to plan and the memory grow with the number of ranks: one job, its batch scaled with the cluster.

    python benchmarks/search/scale.py [--job examples/7b-16xa100/job.yaml] [--most-ranks 16384] [--report REPORT.md]

Every size is planned in a process of its own, from the job file to the plan file, imports included. Seconds are of
processor time (user and system), which other work on the machine disturbs least, and of the wall clock beside it;
beside them stands what the search did, counted, which nothing disturbs: choices timed and weighed, and the solver's
deterministic time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from meshwright.planner.job.job import read_job
from meshwright.planner.plan.plan import SearchWork

_PLAN = """
import sys
from pathlib import Path
from meshwright.planner.job.job import read_job, resolve
from meshwright.planner.plan.plan import Plan, write_plan
from meshwright.runtime.api.planning import plan

job, target = Path(sys.argv[1]), Path(sys.argv[2])
found = plan(resolve(read_job(job), job.parent))
write_plan(target, found) if isinstance(found, Plan) else sys.exit(found.status)
"""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One size: what planning took, and how far the plan is from the best."""

    num_ranks: int
    cpu_seconds: float
    wall_seconds: float
    peak_bytes: int
    period_seconds: float
    gap: float
    work: SearchWork


def plan_scaled(job: Path, num_ranks: int, directory: Path) -> Planned:
    """Plans the job on another number of ranks, in a process of its own. Raises RuntimeError when there is no plan."""
    scaled, plan = directory / f"{num_ranks}.yaml", directory / f"{num_ranks}.json"
    scaled.write_text(yaml.safe_dump(_scaled(job, num_ranks)), encoding="utf-8")
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", _PLAN, str(scaled), str(plan)])
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"no plan on {num_ranks} ranks.")
    found = json.loads(plan.read_text(encoding="utf-8"))
    return Planned(
        num_ranks=num_ranks,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        wall_seconds=wall,
        peak_bytes=usage.ru_maxrss * 1024,
        period_seconds=found["period_seconds"],
        gap=found["solver"]["gap"],
        work=SearchWork.model_validate(found["solver"]["work"]),
    )


def growth_exponent(points: Sequence[Planned]) -> float:
    """The slope of log(processor seconds) over log(ranks), by least squares."""
    pairs = [(math.log(point.num_ranks), math.log(point.cpu_seconds)) for point in points]
    mean_x, mean_y = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in pairs) / sum((x - mean_x) ** 2 for x, _ in pairs)


def table(points: Sequence[Planned]) -> list[str]:
    """Rows of Markdown with a bar of the processor seconds beside each."""
    most = max(point.cpu_seconds for point in points)
    rows = [
        "| ranks | processor s | wall s | peak MiB | timed | weighed | solver units | step s | gap | |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|:---|",
    ]
    for point in points:
        bar = "#" * max(1, round(40 * point.cpu_seconds / most))
        rows.append(
            f"| {point.num_ranks:,} | {point.cpu_seconds:.1f} | {point.wall_seconds:.1f} | "
            f"{point.peak_bytes / 2**20:.0f} | {point.work.num_time_costs:,} | {point.work.num_memory_costs:,} | "
            f"{point.work.deterministic_time:.2f} | {point.period_seconds:.2f} | {point.gap:.2%} | `{bar}` |"
        )
    return rows


def _scaled(job: Path, num_ranks: int) -> dict[str, Any]:
    """The job on whole nodes, or on part of one, with as many sequences per rank."""
    document: dict[str, Any] = yaml.safe_load(job.read_text(encoding="utf-8"))
    read_job(job)
    cluster, workload = document["cluster"], document["workload"]
    per_node = min(num_ranks, cluster["ranks_per_node"])
    ranks = cluster["nodes"] * cluster["ranks_per_node"]
    workload["batch_size"] = workload["batch_size"] * num_ranks // ranks
    document["cluster"] = {**cluster, "nodes": num_ranks // per_node, "ranks_per_node": per_node}
    for source in document["models"].values():
        source["path"] = str((job.parent / source["path"]).resolve())
    return document


def _processor() -> str:
    """The machine's own name of its processor, or its architecture."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, default=Path("examples/7b-16xa100/job.yaml"))
    parser.add_argument("--most-ranks", type=int, default=16384)
    parser.add_argument("--report", type=Path, help="where to write the report; default: only printed")
    asked = parser.parse_args()
    points = []
    with tempfile.TemporaryDirectory() as directory:
        num_ranks = 8
        while num_ranks <= asked.most_ranks:
            points.append(plan_scaled(asked.job, num_ranks, Path(directory)))
            print(points[-1], flush=True)
            num_ranks *= 2
    lines = [
        f"# Time to plan over the number of ranks, {date.today().isoformat()}",
        "",
        f"`python benchmarks/search/scale.py --job {asked.job}` on {_processor()}.",
        "From the job file to the plan file, imports included; to the usual gap: 1 %, above 1,024 ranks 3 %.",
        "The batch grows with the ranks.",
        "",
        *table(points),
        "",
        f"Processor seconds grow as ranks to the power of {growth_exponent(points):.2f}; most memory "
        f"{max(point.peak_bytes for point in points) / 2**20:.0f} MiB.",
    ]
    print("\n".join(lines))
    if asked.report:
        asked.report.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
