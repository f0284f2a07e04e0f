"""The options by which a job's lengths are those of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.planner.imports.length_traces import parse_fields
from meshwright.profiles.environment.seen_lengths import SeenLengths
from meshwright.profiles.errors import BadInput
from meshwright.runtime.api.starting import seen_lengths

FromTrace = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN_DIR|FILE.jsonl",
        help="Take lengths, turns and latencies from a run, or from a rollout a line of any trainer.",
    ),
]
TraceFields = Annotated[
    list[str] | None,
    typer.Option(
        "--trace-field",
        help="A key of that file, as response=completion_length; prompt, response, result and latency are read.",
    ),
]


def lengths_in(trace: Path | None, fields: list[str] | None) -> SeenLengths | None:
    """The lengths that were asked for, if any. Raises BadInput for keys of no file."""
    if trace is None:
        if fields:
            raise BadInput("--trace-field names keys of the file of --from-trace; give that too.")
        return None
    return seen_lengths(trace, parse_fields(fields or ()))
