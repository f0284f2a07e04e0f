"""The command that corrects a profile by the measured times of a run."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from meshwright.planner.plan.plan import read_plan
from meshwright.profiles.errors import BadInput
from meshwright.profiles.table import write_table
from meshwright.runtime.api.measurements import calibrate as correct_table
from meshwright.runtime.cli import view_run
from meshwright.runtime.cli.call import read_profile
from meshwright.runtime.cli.options import AsJson, PlanPath, Profile
from meshwright.runtime.records.outputs import Output, OutputKind, require_outputs

EXAMPLES = "Example: meshwright calibrate plan.json run --profile table.json -o table2.json"


def calibrate(
    plan: PlanPath,
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The --out of a `meshwright run` of this plan.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Write the corrected table here; a new file.")],
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Correct a profile by the times of a run; its measurements stay, corrections are added with their origin."""
    if os.path.lexists(output):
        raise BadInput(f"{output} exists, and a calibration overwrites nothing; name a new file.")
    require_outputs(Output("-o", output, OutputKind.TABLE))
    calibration = correct_table(read_plan(plan), run, read_profile(profile))
    write_table(output, calibration.table)
    if as_json:
        corrections = [correction.model_dump(mode="json") for correction in calibration.table.corrections]
        typer.echo(json.dumps({**asdict(calibration), "table": str(output), "corrections": corrections}, indent=2))
    else:
        view_run.print_calibration(calibration, output)
