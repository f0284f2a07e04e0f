"""Arguments and options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

JobPath = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job: models, cluster, workload, PPO, data.")]
PlanPath = Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan written by `meshwright plan`.")]
Profile = Annotated[Path | None, typer.Option(help="A table of `meshwright profile`; analytic costs without.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]


class DurationsFrom(StrEnum):
    """Where a simulation takes its seconds from."""

    SAMPLED = "sampled"
    PLANNED = "planned"


From = Annotated[DurationsFrom, typer.Option(help="Every step exactly as planned, or with drawn lengths.")]
Steps = Annotated[int, typer.Option(min=1, help="Steps to report; one more is run before them.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the lengths drawn for each step.")]
TracePath = Annotated[Path | None, typer.Option(help="Where a timeline for Perfetto goes.")]


class SchemaOf(StrEnum):
    JOB = "job"
    PLAN = "plan"
    TABLE = "table"
