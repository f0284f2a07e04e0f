"""Pins from a file: one on each line, as on the command line, or all choices of a plan."""

from __future__ import annotations

from pathlib import Path

from meshwright.planner.plan.pins import parse_pin
from meshwright.planner.plan.plan import Plan, read_plan
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import Stage, StageGraph
from meshwright.profiles.untrusted_text import read_text

_MAX_BYTES = 2**20
"""The size limit of a file of pins; a plan may be larger."""


def read_pins(path: Path, graph: StageGraph) -> tuple[str, ...]:
    """Return the pins in a file: all choices of a plan (`.json`), or one pin on each line.

    A line is `stage.key=value`, or `stage.key!=value` to forbid a choice, and may end in a comment (`#`). Raises
    BadInput with the number of a malformed line, and for a file without pins.
    """
    if path.suffix == ".json":
        return pins_of(read_plan(path))
    pins = []
    for number, line in enumerate(read_text(path, "pins", _MAX_BYTES).splitlines(), start=1):
        if text := line.partition("#")[0].strip():
            try:
                pins.append(str(parse_pin(text, graph)))
            except BadInput as error:
                raise BadInput(f"pins {path}, line {number}: {error}") from None
    if not pins:
        raise BadInput(f"pins {path} has none; write one to a line, as actor_train.layout=tp2,pp1,dp4.")
    return tuple(pins)


def pins_of(plan: Plan) -> tuple[str, ...]:
    """The pins that fix every choice of a plan: pools, layouts and schedules."""
    return tuple(
        f"{placement.stage}.{key}={plan.choice(placement.stage, key)}"
        for placement in plan.placements
        for key in ("pool", "layout", "offload", *_schedule_keys(plan, plan.graph.by_name[placement.stage]))
    )


def _schedule_keys(plan: Plan, stage: Stage) -> tuple[str, ...]:
    """The fields of a schedule that apply to a stage, without its offload."""
    if stage.generates:
        waiting = ("while_waiting",) if plan.facts.workload.turns else ()
        drafts = ("draft_tokens",) if plan.facts.workload.speculation else ()
        return "generation_slots", "batches_in_flight", "overcommit", *waiting, *drafts
    cap = plan.placement(stage.name).schedule.micro_batch_tokens
    return "micro_batch_tokens" if cap else "micro_batch_size", "recompute" if stage.trains else "chunk_tokens"
