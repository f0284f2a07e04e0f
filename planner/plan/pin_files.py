"""Pins of a whole job in one file: one to a line as on the command line, or a plan, whose choices they are."""

from __future__ import annotations

from pathlib import Path

from meshwright.planner.plan.pins import parse_pin
from meshwright.planner.plan.plan import Plan, read_plan
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import Stage, StageGraph
from meshwright.profiles.values import read_text

_MOST_BYTES = 2**20
"""Of a file of pins; a plan may have more."""


def read_pins(path: Path, graph: StageGraph) -> tuple[str, ...]:
    """The pins in a file, of stages of a graph: those of a plan where it is one (`.json`), else its lines.

    A line is `stage.key=value`, or `stage.key!=value` for what is left out, and may end in a comment (`#`). Raises
    BadInput naming the line, and for a file without any.
    """
    if path.suffix == ".json":
        return pins_of(read_plan(path))
    found = []
    for number, line in enumerate(read_text(path, "pins", _MOST_BYTES).splitlines(), start=1):
        if text := line.partition("#")[0].strip():
            try:
                found.append(str(parse_pin(text, graph)))
            except BadInput as error:
                raise BadInput(f"pins {path}, line {number}: {error}") from None
    if not found:
        raise BadInput(f"pins {path} has none; write one to a line, as actor_train.layout=tp2,pp1,dp4.")
    return tuple(found)


def pins_of(plan: Plan) -> tuple[str, ...]:
    """The pins that fix every choice of a plan: pools, layouts and schedules."""
    return tuple(
        f"{placement.stage}.{key}={plan.choice(placement.stage, key)}"
        for placement in plan.placements
        for key in ("pool", "layout", "offload", *_keys(plan, plan.graph.by_name[placement.stage]))
    )


def _keys(plan: Plan, stage: Stage) -> tuple[str, ...]:
    """The settings of a schedule that concern a stage beside its offload."""
    if stage.generates:
        waiting = ("while_waiting",) if plan.facts.workload.turns else ()
        return "generation_slots", "batches_in_flight", "overcommit", *waiting
    cap = plan.placement(stage.name).schedule.micro_batch_tokens
    return "micro_batch_tokens" if cap else "micro_batch_size", "recompute" if stage.trains else "chunk_tokens"
