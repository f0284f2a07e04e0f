"""Calibration: corrections of a profile table from the trace of a run, with the plan re-evaluated at the observed
lengths.

Collectives come first, if stages with the same computation communicate differently. Then computation: stages that
share a shape and a kernel pass share one factor, with which the sum of their predicted seconds equals the measured sum.
These groups are solved one after the other, since training with full recomputation runs the forward pass too. Then
refits. The rest of the step lies between its stages and is attributed to transfers of experience.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.planner.analysis.trace_analysis import observe_run
from meshwright.planner.plan.cost_queries import cost_model_of, query_for_placement
from meshwright.planner.plan.plan import Plan, read_run_plan
from meshwright.planner.search.re_evaluate import re_evaluate
from meshwright.profiles.documents import digest
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import OWN_ENGINES, EngineName
from meshwright.profiles.hardware import require_uniform
from meshwright.profiles.observations import (
    RunObservation,
    collective_factor,
    compute_factor,
    empty_table,
    extra_transfer_seconds,
    observe_workload,
    timed_passes_of,
)
from meshwright.profiles.table import Correction, Shape, Table, TimedPass, Traffic, TrafficCorrection, shape_of
from meshwright.profiles.trace import Span, read_recent_spans
from meshwright.profiles.workload import Workload

_WITHOUT_TABLE = "calibrate without a table"
"""The operation that a cluster of several kinds of nodes does not support, for the error message."""


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """Seconds of a stage, of all refits, or of the step. Those before and after the calibration are predicted at the
    lengths that the run observed."""

    stage: str
    planned_seconds: float
    before_seconds: float
    measured_seconds: float
    after_seconds: float


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Stages whose shards have one shape and run the same kernel passes. `corrections`, one for each pass, have a
    factor of 1 until they are applied."""

    stages: tuple[str, ...]
    corrections: tuple[Correction, ...]

    def applied(self, table: Table, factor: float) -> Table:
        """The table with these corrections appended, with this factor."""
        appended = tuple(correction.model_copy(update={"factor": factor}) for correction in self.corrections)
        return table.model_copy(update={"corrections": (*table.corrections, *appended)})


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The corrected table, with predictions before and after. Response tokens are means per response."""

    table: Table
    num_steps: int
    response_tokens: float | None
    expected_response_tokens: float
    rows: tuple[StageRow, ...]


def read_run(plan: Plan, directory: Path) -> tuple[Span, ...]:
    """Return the trace of a run of this plan; of a long run, its last steps. Raises BadInput for a directory without a
    trace, and for a run of another plan."""
    if read_run_plan(directory) != plan:
        raise BadInput(f"{directory} is a run of another plan; give the plan.json in that directory.")
    return read_recent_spans(directory / "trace.jsonl")


def calibrate(plan: Plan, spans: tuple[Span, ...], table: Table | None, *, date: str) -> Calibration:
    """Return the table with a correction for each shape and kernel pass of the plan. Raises BadInput for a trace that
    cannot be used."""
    require_calibratable(plan, table)
    base, workload = _base(plan, table, date), plan.facts.workload
    observation = observe_run(plan, spans)
    observed_workload = observe_workload(workload, observation)
    corrected = _with_collectives(plan, observation, observed_workload, base, date)
    for group in _groups(plan, observation, date):
        corrected = group.applied(corrected, _factor(plan, group, observation, observed_workload, corrected))
    corrected = _with_transfers(
        plan, observation, observed_workload, _with_refits(plan, observation, observed_workload, corrected, date), date
    )
    return Calibration(
        table=corrected,
        num_steps=observation.num_steps,
        response_tokens=observation.response_tokens,
        expected_response_tokens=workload.sampled_lengths.mean,
        rows=tuple(
            _rows(
                plan,
                observation,
                _re_evaluated(plan, observed_workload, base),
                _re_evaluated(plan, observed_workload, corrected),
            )
        ),
    )


def seconds_at_observed_lengths(plan: Plan, spans: tuple[Span, ...], table: Table | None) -> dict[str, float]:
    """Return the predicted seconds of each stage, of all refits and of the step at the lengths that a run observed.

    Raises BadInput for a trace or a plan that cannot be used; see `calibrate`.
    """
    require_calibratable(plan, table)
    predicted = _re_evaluated(plan, observe_workload(plan.facts.workload, observe_run(plan, spans)), table)
    seconds = {placement.stage: placement.cost.total for placement in predicted.placements}
    return {**seconds, "refit": _refit_seconds(predicted), "step": predicted.period_seconds}


def require_calibratable(plan: Plan, table: Table | None) -> None:
    """Raises BadInput for a plan whose runs cannot calibrate a table, and without the table that it was made with."""
    if plan.facts.workload.dynamic_sampling:
        raise BadInput(
            "the run uses dynamic sampling (workload.dynamic_sampling), whose steps have different numbers of waves, "
            "which a correction cannot tell from slow stages; calibrate with a run of the job without it."
        )
    if any(stage.judges for stage in plan.graph.stages):
        raise BadInput(
            "the run has a judge that generates, whose seconds depend on the lengths of its verdicts, which are not "
            "recorded; calibrate with a run of a job without it."
        )
    if table is None and "profile" in plan.digests:
        raise BadInput("the plan was made with a measured table; give it with --profile.")
    if table is None:
        require_uniform(plan.facts.cluster, _WITHOUT_TABLE)


def _rows(plan: Plan, observation: RunObservation, before: Plan, after: Plan) -> Iterator[StageRow]:
    """The rows of the stages by start time, of the refits if the trace has any, and of the step."""
    for p in sorted(plan.placements, key=lambda p: p.start_seconds):
        costs = (each.placement(p.stage).cost.total for each in (plan, before, after))
        yield _row(p.stage, observation.seconds[p.stage], *costs)
    if observation.refit_seconds is not None:
        yield _row("refits", observation.refit_seconds, *(_refit_seconds(each) for each in (plan, before, after)))
    yield _row("step", observation.step_seconds, *(each.period_seconds for each in (plan, before, after)))


def _row(name: str, measured: float, planned: float, before: float, after: float) -> StageRow:
    return StageRow(
        stage=name, planned_seconds=planned, before_seconds=before, measured_seconds=measured, after_seconds=after
    )


def _with_collectives(
    plan: Plan, observation: RunObservation, observed_workload: Workload, table: Table, date: str
) -> Table:
    """The table with a factor for all collectives, if the trace determines one."""
    doubled_collectives = _corrected(table, plan, observation, date, traffic=Traffic.COLLECTIVE, factor=2.0)
    parts = []
    for group in _groups(plan, observation, date):
        predicted, computing, exchanging = (
            _seconds(plan, observed_workload, candidate, group.stages)
            for candidate in (table, group.applied(table, 2.0), doubled_collectives)
        )
        shares = []
        for stage in group.stages:
            computed, exchanged = computing[stage] - predicted[stage], exchanging[stage] - predicted[stage]
            fixed = predicted[stage] - computed - exchanged
            measured = observation.seconds[stage]
            shares.append(((measured - fixed) / measured, computed / measured, exchanged / measured))
        parts.append(shares)
    slowdown = collective_factor(parts)
    if slowdown is None:
        return table
    return _corrected(table, plan, observation, date, traffic=Traffic.COLLECTIVE, factor=slowdown)


def _with_refits(
    plan: Plan, observation: RunObservation, observed_workload: Workload, table: Table, date: str
) -> Table:
    """The table with a factor for all refits, if the plan and the trace have any."""
    predicted = _refit_seconds(_re_evaluated(plan, observed_workload, table))
    if observation.refit_seconds is None or not predicted:
        return table
    slowdown = compute_factor(observation.refit_seconds, predicted, 2 * predicted)
    return _corrected(table, plan, observation, date, traffic=Traffic.REFIT, factor=slowdown)


def _with_transfers(
    plan: Plan, observation: RunObservation, observed_workload: Workload, table: Table, date: str
) -> Table:
    """The table with extra seconds for every transfer, so that the predicted step equals the measured one; unchanged if
    the step took no longer than its stages."""

    def with_extra(seconds: float) -> Table:
        return _corrected(table, plan, observation, date, traffic=Traffic.TRANSFER, seconds=seconds)

    seconds = extra_transfer_seconds(
        observation.step_seconds, lambda s: _re_evaluated(plan, observed_workload, with_extra(s)).period_seconds
    )
    return with_extra(seconds) if seconds else table


def _corrected(table: Table, plan: Plan, observation: RunObservation, date: str, **changes: object) -> Table:
    """The table with one more traffic correction appended."""
    origin = {"plan": digest(plan), "num_steps": observation.num_steps, "date": date}
    correction = TrafficCorrection.model_validate({**origin, **changes})
    return table.model_copy(update={"traffic": (*table.traffic, correction)})


def _re_evaluated(plan: Plan, workload: Workload, table: Table | None) -> Plan:
    """The plan re-evaluated for this workload."""
    facts = plan.facts.model_copy(update={"workload": workload})
    return re_evaluate(plan, facts, cost_model_of(facts, table))


def _refit_seconds(plan: Plan) -> float:
    """The predicted seconds of all refits together; refits that share ranks run one after the other."""
    return math.fsum(refit.cost.total for refit in plan.refits)


def _base(plan: Plan, table: Table | None, date: str) -> Table:
    """The table to correct; an empty one for a plan that was made without a table."""
    if table is not None:
        return table
    cluster = require_uniform(plan.facts.cluster, _WITHOUT_TABLE)
    return empty_table(
        device=cluster.device.name,
        kind=cluster.device.kind,
        precision=plan.facts.precision,
        num_ranks=cluster.ranks_per_node,
        date=date,
    )


def _groups(plan: Plan, observation: RunObservation, date: str) -> Iterator[_Group]:
    """The groups of the plan's stages, in the order of the stages: forward before training."""
    groups: dict[tuple[Shape, tuple[TimedPass, ...], EngineName | None], list[str]] = {}
    separate = None if plan.facts.engine in OWN_ENGINES else plan.facts.engine
    for stage in plan.graph.stages:
        placement = plan.placement(stage.name)
        shape = shape_of(plan.facts.models.spec(stage.role), placement.layout.tp)
        engine = separate if stage.generates else None
        groups.setdefault((shape, timed_passes_of(stage), engine), []).append(stage.name)
    for (shape, timed_passes, engine), stages in groups.items():
        corrections = (
            Correction(
                shape=shape,
                timed_pass=timed_pass,
                engine=engine,
                factor=1.0,
                spread=max(observation.spread[stage] for stage in stages),
                stages=tuple(stages),
                plan=digest(plan),
                num_steps=observation.num_steps,
                date=date,
            )
            for timed_pass in timed_passes
        )
        yield _Group(stages=tuple(stages), corrections=tuple(corrections))


def _factor(plan: Plan, group: _Group, observation: RunObservation, observed_workload: Workload, table: Table) -> float:
    """The factor of the group's kernel passes. Raises BadInput if no factor explains the measured seconds."""
    predicted, doubled = (
        sum(_seconds(plan, observed_workload, candidate, group.stages).values())
        for candidate in (table, group.applied(table, 2.0))
    )
    measured = sum(observation.seconds[stage] for stage in group.stages)
    solved = compute_factor(measured, predicted, doubled)
    if solved <= 0:
        raise BadInput(
            f"{' and '.join(group.stages)}: messages and scheduling alone are predicted to take "
            f"{2 * predicted - doubled:.3g} s and the whole was measured to take {measured:.3g} s; "
            "profile this machine and calibrate that table."
        )
    return solved


def _seconds(plan: Plan, workload: Workload, table: Table, stages: Sequence[str] = ()) -> dict[str, float]:
    """Predicted seconds of these stages, or of all if none is named, with the plan's placements and this workload."""
    model = cost_model_of(plan.facts.model_copy(update={"workload": workload}), table)
    return {
        p.stage: model.seconds(query_for_placement(plan, p)).total
        for p in plan.placements
        if not stages or p.stage in stages
    }
