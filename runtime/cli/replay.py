"""The command that trains again on a batch that a run skipped."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from meshwright.profiles.untrusted_text import printable
from meshwright.runtime.api.runs import replay as replay_batch
from meshwright.runtime.cli.options import AsJson
from meshwright.runtime.records.results import BatchReplay

EXAMPLES = "Example: meshwright replay run/skipped/step-000012-actor_train.safetensors"


def replay(
    batch: Annotated[Path, typer.Argument(metavar="FILE", help="A file under skipped/ in the directory of a run.")],
    as_json: AsJson = False,
) -> None:
    """Train again on a batch that a run skipped because of numbers that are not finite, and name the rows.

    It runs in one process on the CPU, with the weights of the newest earlier checkpoint, and changes nothing.
    """
    replayed = replay_batch(batch)
    if as_json:
        typer.echo(json.dumps(_plain(asdict(replayed)), indent=2))
    else:
        _show(replayed)


def _show(replayed: BatchReplay) -> None:
    typer.echo(f"{replayed.stage} of step {replayed.step}, with the weights after {replayed.weights_of_step} steps")
    for reason in replayed.reasons:
        typer.echo(f"skipped: {printable(reason)}")
    for number, update in enumerate(replayed.updates):
        rows = (
            f"not finite alone: rows {', '.join(map(str, update.bad_rows))}" if update.bad_rows else "all rows finite"
        )
        loss = next(value for name, value in update.metrics.items() if name.endswith("_loss"))
        typer.echo(f"update {number}: loss {loss:.6g}, gradient norm {update.metrics['grad_norm']:.6g}; {rows}")


def _plain(value: object) -> object:
    """Return the value as JSON can hold it, with numbers that are not finite as text."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
