"""The options that take lengths from a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.planner.imports.length_traces import parse_fields
from meshwright.profiles.environment.seen_lengths import ObservedLengths
from meshwright.profiles.errors import BadInput
from meshwright.runtime.api.starting import observed_lengths

FromTrace = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN_DIR|FILE.jsonl",
        help="Take lengths, turns and latencies from a run, or from JSON lines with one rollout each.",
    ),
]
TraceFields = Annotated[
    list[str] | None,
    typer.Option(
        "--trace-field",
        help="A key of that file, as response=completion_length; for prompt, response, result and latency.",
    ),
]


def read_lengths(trace: Path | None, fields: list[str] | None) -> ObservedLengths | None:
    """Read the lengths of --from-trace, if it is given. Raises BadInput for --trace-field without it."""
    if trace is None:
        if fields:
            raise BadInput("--trace-field names keys of the file of --from-trace; give --from-trace too.")
        return None
    return observed_lengths(trace, parse_fields(fields or ()))
