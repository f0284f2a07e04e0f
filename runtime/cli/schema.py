"""The command that prints the JSON Schema of a document."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from meshwright.runtime.api.files import schema as schema_of
from meshwright.runtime.cli.options import SchemaOf

EXAMPLES = "Example: meshwright schema job > job.schema.json"


def schema(document: Annotated[SchemaOf, typer.Argument(help="Which document.")]) -> None:
    """Print the JSON Schema of a document."""
    typer.echo(json.dumps(schema_of(document.value), indent=2, sort_keys=True))
