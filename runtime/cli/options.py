"""Arguments and options that several commands share."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from meshwright.profiles.errors import BadInput
from meshwright.runtime.records.outputs import Output, OutputKind

MAX_STEPS = 10_000
"""Largest number of simulated or rehearsed steps, whose spans are kept in memory."""


def finite(value: float | None) -> float | None:
    """Return the value. Raises typer.BadParameter for NaN and infinity, which option ranges accept."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


JobPath = Annotated[
    Path, typer.Argument(metavar="JOB.yaml", help="The job: models, cluster, workload, data, settings.")
]
PlanPath = Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan written by `meshwright plan`.")]


class TrainerName(StrEnum):
    """Trainers that a plan can be made for."""

    AREAL = "areal"
    NEMO_RL = "nemo-rl"
    OPENRLHF = "openrlhf"
    SKYRL = "skyrl"
    SLIME = "slime"
    VERL = "verl"


ForTrainer = Annotated[
    TrainerName | None, typer.Option("--for", help="Plan within the settings of another trainer; `export` writes them.")
]
PinTexts = Annotated[
    list[str] | None, typer.Option("--pin", help="Fix a choice, as stage.key=value; may be given several times.")
]
ForbidTexts = Annotated[
    list[str] | None,
    typer.Option("--forbid", help="Exclude a choice, as stage.key=value; may be given several times."),
]
PinsPath = Annotated[
    Path | None, typer.Option("--pins", help="A file of pins, one a line, or a plan.json whose choices are all pinned.")
]
Profile = Annotated[
    Path | None, typer.Option(help="A table of `meshwright profile`; without it, costs come from equations.")
]
ModelPaths = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="ROLE=DIR",
        help="Directory of a model on this machine, in place of the job's; may be given several times.",
    ),
]
AllowModule = Annotated[
    list[str] | None,
    typer.Option(help="A module whose functions may be rewards or the tool; may be given several times."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
Price = Annotated[
    float | None, typer.Option(min=0, max=1e9, callback=finite, help="Price of a GPU-hour, in any currency.")
]
NumSteps = Annotated[
    int, typer.Option("--per-steps", min=1, max=10**9, help="Number of steps whose GPU-hours and money are reported.")
]
Gap = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=0.99,
        callback=finite,
        help="Stop when the plan is proven to be within this share of the best; 0 searches to optimality. "
        "Default: 0.01 up to 1,024 ranks, 0.03 above.",
    ),
]


ProofOut = Annotated[
    Path | None, typer.Option("--proof", help="Write a proof here that `meshwright verify` checks without the solver.")
]
ProofIn = Annotated[
    Path | None, typer.Option("--proof", help="A proof of this plan, written by `meshwright plan --proof`.")
]


class DurationsFrom(StrEnum):
    """Source of a simulation's durations."""

    SAMPLED = "sampled"
    PLANNED = "planned"


DurationsOption = Annotated[
    DurationsFrom, typer.Option(help="Sample the lengths of every step, or take every step exactly as planned.")
]
Steps = Annotated[int, typer.Option(min=1, max=MAX_STEPS, help="Steps to simulate, after one warm-up step.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the lengths that are sampled for each step.")]
TracePath = Annotated[Path | None, typer.Option(help="Write a timeline for Perfetto here.")]


def timeline_output(trace: Path | None) -> Output | None:
    """The output of `--trace`, if it is given."""
    return Output("--trace", trace, OutputKind.TIMELINE) if trace else None


class SchemaOf(StrEnum):
    """The documents whose JSON Schema can be printed."""

    JOB = "job"
    PLAN = "plan"
    TABLE = "table"


_MAX_SIZES = 64
"""Maximum number of cluster sizes in --sizes; each takes a search."""


def parse_sizes(text: str | None) -> tuple[int, ...]:
    """Return the numbers in `8,16,32`, each once; none if the text is None. Raises BadInput for any other text."""
    if text is None:
        return ()
    try:
        sizes = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise BadInput(f"--sizes {text!r} is not a list of whole numbers; write it like 8,16,32.") from None
    if len(sizes) > _MAX_SIZES:
        raise BadInput(f"--sizes has {len(sizes)} numbers, and each takes a search; give {_MAX_SIZES} at most.")
    return sizes
