"""Plans a job as it is and with some fields set otherwise, compares the two plans, and draws them over one axis:

python examples/compare.py examples/7b-8xa100-80gb/job.yaml staleness=2 -o compared.html
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from meshwright import api
from meshwright.planner.plan.evaluate import ranks_of
from meshwright.planner.report import formatting
from meshwright.planner.report.charts import Box, Label, lane_chart, linear
from meshwright.planner.report.rendering import page

_HEIGHT = 480.0
"""Pixels of both plans together."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path, help="the job, planned with analytic costs")
    parser.add_argument(
        "setting", nargs="+", help="a field of its facts that the other plan has otherwise, field=value"
    )
    parser.add_argument("--gap", type=float, default=0.1, help="how near to the best each plan is proven to be")
    parser.add_argument("-o", "--output", type=Path, required=True, help="an HTML file for the picture")
    arguments = parser.parse_args()
    try:
        plans = plans_of(arguments.job, arguments.setting, api.Limits(gap=arguments.gap))
    except api.MeshwrightError as error:
        sys.exit(f"error: {error}")
    for row in table_of(plans):
        print("".join(f"{text:<24}" for text in row).rstrip())
    arguments.output.write_text(page_of(plans), encoding="utf-8")


def plans_of(path: Path, settings: list[str], limits: api.Limits) -> dict[str, api.Plan]:
    """Both plans by what they are called. Raises BadInput for a setting that is none, Infeasible where none fits."""
    facts = api.resolve(api.read_job(path), path.parent)
    jobs = {"as it is": facts, f"with {' '.join(settings)}": api.with_setting(facts, dict(map(_read, settings)))}
    plans = {}
    for name, changed in jobs.items():
        found = api.plan(changed, limits=limits)
        if isinstance(found, api.NoPlan):
            raise api.Infeasible(f"{name}: {found.limits[0].sentence}")
        plans[name] = found
    return plans


def _read(setting: str) -> tuple[str, object]:
    """The field and its value: a number where it is one, else the text itself."""
    field, _, text = setting.partition("=")
    try:
        return field, json.loads(text)
    except ValueError:
        return field, text


def table_of(plans: Mapping[str, api.Plan]) -> Iterator[tuple[str, ...]]:
    """A row for each number and each stage, a column for each plan."""
    simulated = [api.simulate(plan, steps=10) for plan in plans.values()]
    yield "", *plans
    yield "planned step", *(f"{plan.period_seconds:.1f} s" for plan in plans.values())
    yield "proven within", *(f"{plan.solver.gap:.1%}" for plan in plans.values())
    yield "SIMULATED step", *(f"{one.steps.mean:.1f} s" for one in simulated)
    yield "SIMULATED idle time", *(f"{one.cluster.idle_share:.1%}" for one in simulated)
    for stage in sorted(placement.stage for placement in next(iter(plans.values())).placements):
        yield stage, *(str(plan.placement(stage).layout) for plan in plans.values())


def page_of(plans: Mapping[str, api.Plan]) -> str:
    """One turn of each plan, ranks from top to bottom, on the same seconds."""
    num_ranks = [plan.facts.cluster.num_ranks for plan in plans.values()]
    firsts = [sum(num_ranks[:place]) for place in range(len(plans))]
    drawn = lane_chart(
        [box for plan, first in zip(plans.values(), firsts, strict=True) for box in _boxes(plan, first)],
        axis=linear(0.0, max(plan.period_seconds for plan in plans.values())),
        unit="s",
        num_lanes=sum(num_ranks),
        lane_height=_HEIGHT / sum(num_ranks),
        labels=[Label(a, a + n - 1, name) for name, a, n in zip(plans, firsts, num_ranks, strict=True)],
        rules=firsts,
        describe="which stage runs on which ranks at what time of a turn, plan below plan",
    )
    title = f"The job {' and '.join(plans)}"
    said = "One turn of each plan as predicted: ranks from top to bottom, seconds from left to right."
    return page(title, said, drawn)


def _boxes(plan: api.Plan, first_lane: int) -> Iterator[Box]:
    for placement in plan.placements:
        ranks = ranks_of(plan, placement)
        yield Box(
            first=first_lane + min(ranks),
            last=first_lane + max(ranks),
            start=placement.start_seconds,
            end=placement.end_seconds,
            colour=formatting.colour(placement.stage, plan.graph),
            title=f"{placement.stage}: {placement.start_seconds:.1f} to {placement.end_seconds:.1f} s",
            lines=(placement.stage, str(placement.layout)),
        )


if __name__ == "__main__":
    main()
