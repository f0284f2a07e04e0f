"""The command that prints the JSON Schema of a document."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from meshwright.planner.job.job import Job
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.documents import Document
from meshwright.profiles.table import Table
from meshwright.runtime.cli.options import SchemaOf

EXAMPLES = "Example: meshwright schema job > job.schema.json"


def schema(document: Annotated[SchemaOf, typer.Argument(help="Which document.")]) -> None:
    """Print the JSON Schema of a document."""
    kinds: dict[SchemaOf, type[Document]] = {SchemaOf.JOB: Job, SchemaOf.PLAN: Plan, SchemaOf.TABLE: Table}
    typer.echo(json.dumps(kinds[document].model_json_schema(), indent=2, sort_keys=True))
