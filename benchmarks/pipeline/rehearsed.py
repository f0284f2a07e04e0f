"""The ablation's first and last row on real processes: the best plan of one layout, and the best of the whole space.

    python -m benchmarks.pipeline.rehearsed long-tail-64 --plans DIR

Plans are read from DIR where `benchmarks.pipeline.ablation --plans DIR` has left them, and else found and left there.
Both rows are simulated and rehearsed with the same drawn lengths, in the same steps. Nothing computes: devices wait for
the predicted seconds, times the speed that `meshwright rehearse` chooses for this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.pipeline.ablation import SINGLE, SPACES, ablate
from benchmarks.pipeline.jobs import JOBS, facts_of
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan, read_plan
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.runtime.execution.rehearse import rehearse

STEPS = 3
ROWS = {0: SINGLE, len(SPACES): SPACES[-1]}
"""By their numbers in the ablation."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan. Gains are ratios of mean steps, over the first row."""

    job: str
    space: str
    predicted_seconds: float
    simulated_seconds: float
    rehearsed_seconds: float
    error: float
    speed: float
    processor_share: float
    simulated_gain: float = 1.0
    rehearsed_gain: float = 1.0
    load: float  # runnable processes of this machine, on average over the last minute when the rehearsal ended


def main() -> None:
    arguments = _arguments()
    if not arguments.json:
        print(_HEADINGS)
    for row in rows(arguments.job, arguments.plans):
        print(json.dumps(asdict(row)) if arguments.json else in_markdown(row), flush=True)


def rows(job: str, directory: Path) -> Iterator[Row]:
    """The two rows of a job; plans that are not in the directory are found first."""
    paths = {number: directory / f"{job}-{number}.json" for number in ROWS}
    for number, path in paths.items():
        if not path.exists():
            find(job, number, path)
    first: Row | None = None
    for number, path in paths.items():
        row = compare(job, ROWS[number].name, read_plan(path))
        first = first or row
        gains = first.simulated_seconds / row.simulated_seconds, first.rehearsed_seconds / row.rehearsed_seconds
        yield replace(row, simulated_gain=gains[0], rehearsed_gain=gains[1])


def find(job: str, number: int, path: Path) -> None:
    """Leaves the plan of a row of the ablation at the path."""
    found = path.with_suffix(".found")
    spaces = () if number == 0 else (ROWS[number],)
    for _ in ablate(job, facts_of(job), found, spaces):
        pass
    (found / f"{job}-{len(spaces)}.json").rename(path)
    shutil.rmtree(found)


def compare(job: str, space: str, plan: Plan) -> Row:
    """The row of a plan that is compared with itself."""
    found = rehearse(plan, Sampled(plan, cost_model_of, seed=0), steps=STEPS)
    return Row(
        job=job,
        space=space,
        predicted_seconds=plan.period_seconds,
        simulated_seconds=found.simulated.mean,
        rehearsed_seconds=found.steps.mean,
        error=found.error,
        speed=found.speed,
        processor_share=found.processor_share,
        load=os.getloadavg()[0],
    )


_HEADINGS = (
    "| space | PREDICTED period s | SIMULATED step s | REHEARSED step s | rehearsed over simulated | SIMULATED gain | "
    "REHEARSED gain | speed | processors used | load |\n|---|---|---|---|---|---|---|---|---|---|"
)


def in_markdown(row: Row) -> str:
    cells = (
        row.space,
        f"{row.predicted_seconds:.2f}",
        f"{row.simulated_seconds:.2f}",
        f"{row.rehearsed_seconds:.2f}",
        f"{row.error:+.1%}",
        f"{row.simulated_gain:.2f}x",
        f"{row.rehearsed_gain:.2f}x",
        f"{row.speed:.3f}",
        f"{row.processor_share:.0%}",
        f"{row.load:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--plans", type=Path, required=True, help="folder of the plans")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of Markdown")
    return parser.parse_args()


if __name__ == "__main__":
    main()
