"""Stages that memory limits: faster choices on the same ranks that do not fit."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cost_models.question import CostModel
from meshwright.planner.analysis.alternatives import free_bytes_for
from meshwright.planner.plan.pins import Pin, Ranks, parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.frontier import frontier
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule

_MIN_GAIN = 1e-2
"""The smallest gain that is reported, relative to the stage's seconds."""


@dataclass(frozen=True, kw_only=True)
class MemoryLimited:
    """The smallest of a stage's faster choices on its ranks that memory excludes, given what other stages keep there.

    `gain_seconds` is the gain of the stage alone, and `lacking_bytes` the memory that a rank lacks for it.
    """

    stage: str
    layout: Layout
    schedule: Schedule
    gain_seconds: float
    lacking_bytes: float


def memory_limited(plan: Plan, model: CostModel) -> tuple[MemoryLimited, ...]:
    """Return the stages that memory limits, the largest gain first. `model` is the cost model of the plan's own
    facts."""
    stages = (_held_back(plan, model, placement.stage) for placement in plan.placements)
    return tuple(sorted((one for one in stages if one is not None), key=lambda one: -one.gain_seconds))


def _held_back(plan: Plan, model: CostModel, stage: str) -> MemoryLimited | None:
    pool, seconds = plan.pool_of(stage), plan.placement(stage).cost.total
    ranks = Ranks(pool.first_rank, pool.num_ranks)
    pins = [pin for pin in parse_pins(plan.pins, plan.graph) if pin.stage == stage and pin.key != "pool"]
    stage_pins = (*pins, Pin(stage, "pool", ranks))
    candidates = frontier(plan.facts, model, plan.stage(stage), stage_pins, is_limited=False).candidates_on(ranks)
    room = free_bytes_for(plan, stage, ranks)
    excluded = [
        candidate
        for candidate in candidates
        if candidate.seconds < seconds * (1 - _MIN_GAIN) and candidate.peak_bytes - candidate.weights_bytes > room
    ]
    if not excluded:
        return None
    smallest = min(excluded, key=lambda candidate: candidate.peak_bytes - candidate.weights_bytes)
    return MemoryLimited(
        stage=stage,
        layout=smallest.layout,
        schedule=smallest.schedule,
        gain_seconds=seconds - smallest.seconds,
        lacking_bytes=smallest.peak_bytes - smallest.weights_bytes - room,
    )
