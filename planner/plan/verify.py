"""Verification of a plan against its own facts, rule by rule. It uses no code of the search, so that it can catch its
errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import combinations

from meshwright.cost_models.memory_cost import DISTRIBUTIONS
from meshwright.planner.plan.evaluate import (
    Times,
    fullest_rank,
    items,
    peak_bytes,
    period_seconds,
    ranks_of,
    task_name_of,
    tasks,
)
from meshwright.planner.plan.layout_and_schedule_rules import available_bytes, layout_rules, schedule_rules
from meshwright.planner.plan.pins import parse_pin
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.pool_rules import overlap_violations, pool_violations
from meshwright.planner.plan.reward_workers import worker_violations
from meshwright.planner.plan.steps_ahead import staleness_of, steps_ahead_patterns, steps_ahead_violations
from meshwright.profiles.errors import BadInput, require_none, suggestion
from meshwright.profiles.layout import Layout, layers_per_stage
from meshwright.profiles.stages import GENERATE

_TOLERANCE = 1e-9
"""The error, relative to the period, that summing the same numbers in another order may cause."""

_MAX_AMOUNT = 1e24
"""The largest amount of a term, in seconds or bytes: above any real cost, and small enough that sums stay finite."""

ORIGINS = ("job", "profile", "start", "trace")
"""The digests of documents that a plan does not contain: the job, the measured table, the plan that its search started
from, and the trace whose lengths it uses."""

_SHA_256 = re.compile(r"[0-9a-f]{64}")

Check = Callable[[Plan], Iterator[str]]


def verify(plan: Plan) -> tuple[str, ...]:
    """Return one sentence for each broken rule; empty for a valid plan. Names are checked first, then choices, then
    their consequences; a group of rules is checked only if the plan keeps the groups before it."""
    for checks in (_NAMES, _CHOICES, _CONSEQUENCES):
        sentences = tuple(sentence for check in checks for sentence in check(plan))
        if sentences:
            return sentences
    return ()


def require_valid(plan: Plan) -> None:
    """Raises BadInput with the first rule that the plan breaks."""
    require_none(verify(plan), "plan")


def _stages_are_complete(plan: Plan) -> Iterator[str]:
    placed = [placement.stage for placement in plan.placements]
    for stage in plan.graph.names:
        if placed.count(stage) != 1:
            yield f"{stage} is placed {placed.count(stage)} times; place it once."
    for stage in placed:
        if stage not in plan.graph.by_name:
            yield f"{stage} is placed but is not a stage of {plan.facts.algorithm}; remove it."


def _pools_are_named_once(plan: Plan) -> Iterator[str]:
    names = [pool.name for pool in plan.pools]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"pool {name!r} is defined {names.count(name)} times; define it once."
    for one, other in combinations(plan.pools, 2):
        if one.ranks == other.ranks and one.name != other.name:
            yield f"pools {one.name!r} and {other.name!r} have the same ranks; use one of them."
    used = [placement.pool for placement in plan.placements]
    for placement in plan.placements:
        if placement.pool not in names:
            yield f"{placement.stage} is placed on pool {placement.pool!r}, which is not defined; define it."
    for name in names:
        if name not in used:
            yield f"no stage is placed on pool {name!r}; remove it."


def _edges_are_the_stage_graph(plan: Plan) -> Iterator[str]:
    expected = {(producer, consumer): fields for producer, consumer, fields in plan.graph.edges}
    planned_fields = {(edge.producer, edge.consumer): edge.fields for edge in plan.edges}
    if len(planned_fields) < len(plan.edges):
        yield "an edge is listed twice; list each once."
    for (producer, consumer), fields in expected.items():
        if sorted(planned_fields.get((producer, consumer), ())) != sorted(fields):
            yield f"the edge {producer} -> {consumer} must carry {', '.join(fields)}."
    for producer, consumer in planned_fields.keys() - expected.keys():
        yield f"the edge {producer} -> {consumer} carries nothing that {consumer} reads; remove it."


def _refits_name_stages(plan: Plan) -> Iterator[str]:
    for refit in plan.refits:
        for end in (refit.source, refit.target):
            if end not in plan.graph.by_name:
                yield f"the refit {refit.source} -> {refit.target} names {end!r}; {suggestion(end, plan.graph.names)}"


def _digests_match_the_facts(plan: Plan) -> Iterator[str]:
    known = plan.facts.digests()
    for name, digest in known.items():
        if plan.digests.get(name) != digest:
            yield f"the digest of {name} does not match the plan's facts; plan the job again."
    for name in plan.digests:
        if name not in known and name not in ORIGINS:
            yield f"the digest {name} names no input of a plan; remove it."
        elif not _SHA_256.fullmatch(plan.digests[name]):
            yield f"the digest of {name} is {plan.digests[name]!r}, which is not a SHA-256; plan the job again."


def _steps_ahead_fall_along_the_edges(plan: Plan) -> Iterator[str]:
    ahead = plan.ahead
    yield from steps_ahead_violations(plan.graph, ahead)
    for edge in plan.edges:
        first, then = ahead[edge.producer], ahead[edge.consumer]
        if then > first:
            yield (
                f"{edge.consumer} has steps_ahead={then} and reads what {edge.producer} writes with "
                f"steps_ahead={first}; use {first} or less."
            )


def _stages_work_ahead_together(plan: Plan) -> Iterator[str]:
    ahead = plan.ahead
    if ahead not in steps_ahead_patterns(plan.graph, ahead[GENERATE]):
        described = ", ".join(f"{stage} has steps_ahead={steps}" for stage, steps in ahead.items() if steps)
        yield f"{described}, a combination of steps ahead that no search case has; plan the job again."


def _streams_are_of_one_period(plan: Plan) -> Iterator[str]:
    generation = plan.placement(GENERATE)
    for placement in plan.placements:
        if placement.schedule.chunk_tokens and placement.steps_ahead != generation.steps_ahead:
            yield (
                f"{placement.stage}: chunk_tokens={placement.schedule.chunk_tokens} with "
                f"steps_ahead={placement.steps_ahead}, and {GENERATE} has steps_ahead={generation.steps_ahead}; "
                "a stage streams only within its own period: use chunk_tokens=0."
            )


def _sequences_over_periods_are_scored_by_fixed_weights(plan: Plan) -> Iterator[str]:
    spans_periods = plan.placement(GENERATE).schedule.keeps_in_flight
    for placement in plan.placements:
        if spans_periods and placement.schedule.chunk_tokens and plan.stage(placement.stage).is_trained:
            yield (
                f"{placement.stage}: chunk_tokens={placement.schedule.chunk_tokens}, and its weights change between "
                f"the chunks of a sequence that is in flight for several periods; use chunk_tokens=0."
            )


def _staleness_keeps_its_bound(plan: Plan) -> Iterator[str]:
    generation, bound = plan.placement(GENERATE), plan.facts.staleness
    used = staleness_of(generation.steps_ahead, generation.schedule, bound)
    if plan.staleness != used:
        yield f"staleness={plan.staleness} is not the {used} that follows from {GENERATE}; plan the job again."
    if used > bound:
        yield f"staleness={used} exceeds the job's bound of {bound}; let {GENERATE} work fewer steps ahead."
    if generation.schedule.overcommit and bound == generation.steps_ahead:
        yield f"{GENERATE}: overcommit={generation.schedule.overcommit} needs a staleness above {bound}; use 0."


def _pools_are_legal(plan: Plan) -> Iterator[str]:
    for pool in plan.pools:
        for sentence in pool_violations(plan.facts.cluster, pool.first_rank, pool.num_ranks):
            yield f"pool {pool.name!r}: {sentence}"
    for one, other in combinations(plan.pools, 2):
        for sentence in overlap_violations(one.ranks, other.ranks):
            yield f"pools {one.name!r} and {other.name!r}: {sentence}"


def _layouts_are_legal(plan: Plan) -> Iterator[str]:
    """Yield the first rule that each stage's layout breaks; later violations mostly follow from the first."""
    for placement in plan.placements:
        pool, layout = plan.pool(placement.pool), placement.layout
        broken = layout_rules(plan.facts, plan.stage(placement.stage), layout, plan.part_of(placement.stage))
        if broken:
            yield f"{placement.stage}: {broken[0]}"
        elif layout.num_ranks != pool.num_ranks:
            yield (
                f"{placement.stage}: tp={layout.tp} x pp={layout.pp} x dp={layout.dp}{_times_cp(layout)} is "
                f"{layout.num_ranks} ranks and "
                f"its pool has {pool.num_ranks}; make the product {pool.num_ranks}."
            )


def _stages_hold_the_layers_assigned_to_them(plan: Plan) -> Iterator[str]:
    """Check `stage_layers`, which a plan may leave out."""
    for placement in plan.placements:
        model, pp = plan.facts.models.spec(plan.stage(placement.stage).role), placement.layout.pp
        if not placement.stage_layers or pp > model.num_layers:
            continue
        assigned = layers_per_stage(model, pp)
        if placement.stage_layers != assigned:
            planned, expected = (" ".join(map(str, counts)) for counts in (placement.stage_layers, assigned))
            yield (
                f"{placement.stage}: stage_layers={planned}, and the {model.num_layers} layers of {model.name} "
                f"are split over pp={pp} stages as {expected}; use these."
            )


def _times_cp(layout: Layout) -> str:
    return f" x cp={layout.cp}" if layout.cp > 1 else ""


def _schedules_are_legal(plan: Plan) -> Iterator[str]:
    for placement in plan.placements:
        stage, part = plan.stage(placement.stage), plan.part_of(placement.stage)
        if not layout_rules(plan.facts, stage, placement.layout, part):
            for sentence in schedule_rules(plan.facts, stage, placement.layout, placement.schedule, part):
                yield f"{placement.stage}: {sentence}"


def _refits_are_complete(plan: Plan) -> Iterator[str]:
    needed = {p.stage for p in plan.placements if plan.stage(p.stage).needs_refit and plan.copy_of(p.stage) == p.stage}
    targets = [refit.target for refit in plan.refits]
    for target in sorted(needed - set(targets)):
        yield f"{target} has its own copy of the weights and no refit; add one."
    for refit in plan.refits:
        if refit.target not in needed or targets.count(refit.target) > 1:
            yield f"the refit of {refit.target} is not needed; remove it."
        elif refit.source != plan.graph.train_stage.get(refit.role) or plan.stage(refit.target).role is not refit.role:
            yield f"the refit of {refit.target} comes from {refit.source}, which does not train its weights."


def _pins_are_kept(plan: Plan) -> Iterator[str]:
    for text in plan.pins:
        if plan.pins.count(text) > 1:
            yield f"the pin {text!r} is listed {plan.pins.count(text)} times; list it once."
        try:
            pin = parse_pin(text, plan.graph)
        except BadInput as error:
            yield str(error)
            continue
        value = plan.choice(pin.stage, pin.key)
        if not pin.allows(value):
            yield f"the pin {text!r} is not kept: {pin.stage} has {pin.key}={value}."


def _cost_terms_are_in_range(plan: Plan) -> Iterator[str]:
    costs = [(p.stage, cost) for p in plan.placements for cost in (p.cost, p.resident, p.transient, p.host)]
    costs += [(f"the edge {e.producer} -> {e.consumer}", e.cost) for e in plan.edges]
    costs += [(f"the refit of {r.target}", r.cost) for r in plan.refits]
    for name, cost in costs:
        for term in cost.terms:
            if term.amount < 0:
                yield f"{name}: the cost term {term.name!r} is {term.amount}; a cost adds up from 0."
            elif term.amount > _MAX_AMOUNT:
                yield f"{name}: the cost term {term.name!r} is {term.amount}, above any real cost; plan the job again."


def _tasks_last_as_long_as_they_cost(plan: Plan) -> Iterator[str]:
    for item in items(plan):
        seconds = item.end_seconds - item.start_seconds
        if not _equal(plan, seconds, item.cost.total):
            yield f"{task_name_of(item)} lasts {seconds:.6g} s and its cost is {item.cost.total:.6g} s."


def _inputs_are_ready(plan: Plan) -> Iterator[str]:
    starts = {task_name_of(i): i.start_seconds for i in items(plan)}
    ends = {task_name_of(i): i.end_seconds for i in items(plan)}
    for task in tasks(plan):
        for before, lag in task.after:
            ready = ends[before] + lag
            if starts[task.name] < ready and not _equal(plan, starts[task.name], ready):
                yield f"{task.name} starts at {starts[task.name]:.6g} s, before {before} is ready at {ready:.6g} s."
        for producer in task.after_start_of:
            if starts[task.name] < starts[producer] and not _equal(plan, starts[task.name], starts[producer]):
                yield f"{task.name} starts at {starts[task.name]:.6g} s, before {producer}, which it reads, starts."


def _ranks_do_one_thing_at_a_time(plan: Plan) -> Iterator[str]:
    for one, other in combinations(items(plan), 2):
        common = ranks_of(plan, one) & ranks_of(plan, other)
        start, end = max(one.start_seconds, other.start_seconds), min(one.end_seconds, other.end_seconds)
        if common and start < end and not _equal(plan, start, end):
            yield f"{task_name_of(one)} and {task_name_of(other)} both run on rank {min(common)} at {start:.6g} s."


def _memory_suffices(plan: Plan) -> Iterator[str]:
    expected = peak_bytes(plan)
    if plan.peak_bytes_per_rank != expected:
        yield "peak_bytes_per_rank is not what the placements add up to; plan the job again."
    rank = fullest_rank(plan.facts.cluster, expected)
    limit = plan.facts.cluster.usable_bytes(rank)
    if expected[rank] > limit:
        names = ", ".join(_resident_stages(plan, rank))
        yield (
            f"rank {rank} needs {expected[rank] / 2**30:.1f} GiB for {names} and its device can use "
            f"{limit / 2**30:.1f} GiB; move a stage away or shard it over more ranks."
        )


def _host_memory_suffices(plan: Plan) -> Iterator[str]:
    for placement in plan.placements:
        _, share = available_bytes(plan.facts, plan.part_of(placement.stage))
        if placement.host.total > share:
            is_experience = placement.host.amount(DISTRIBUTIONS) > share
            way_out = "lower distill.teacher_top_k" if is_experience else "set its offload to none"
            yield (
                f"{placement.stage} keeps {placement.host.total / 2**30:.1f} GiB for each rank in host memory, where "
                f"{share / 2**30:.1f} GiB are available to it; {way_out}."
            )


def _the_period_follows_from_the_times(plan: Plan) -> Iterator[str]:
    expected = period_seconds(plan, {task_name_of(i): Times(i.start_seconds, i.end_seconds) for i in items(plan)})
    if not _equal(plan, plan.period_seconds, expected):
        yield f"period_seconds is {plan.period_seconds:.6g} and its tasks take {expected:.6g} s."
    if not _equal(plan, plan.solver.objective_seconds, plan.period_seconds):
        yield f"the objective is {plan.solver.objective_seconds:.6g} s and the period {plan.period_seconds:.6g} s."


def _the_gap_is_the_distance_to_the_bound(plan: Plan) -> Iterator[str]:
    objective, bound = plan.solver.objective_seconds, plan.solver.bound_seconds
    if objective <= 0:
        yield f"the objective is {objective:.6g} s; a period takes more than 0."
    elif not -_TOLERANCE * objective <= bound <= objective * (1 + _TOLERANCE):
        yield f"the bound is {bound:.6g} s; a bound lies between 0 and the objective, {objective:.6g} s."
    elif abs(plan.solver.gap - (objective - bound) / objective) > _TOLERANCE:
        expected = (objective - bound) / objective
        yield f"gap={plan.solver.gap:.3g} is not (objective - bound) / objective = {expected:.3g}."


def _the_status_matches_the_gap(plan: Plan) -> Iterator[str]:
    solver = plan.solver
    if solver.status == "optimal" and not solver.has_requested_gap:
        yield (
            f"status=optimal and gap={solver.gap:.3g} is above the requested {solver.requested_gap:g}; "
            "a search that ended there is feasible."
        )
    elif solver.status == "optimal" and solver.bound_seconds <= 0:
        yield "status=optimal and no bound is known; a search without a bound is feasible."
    elif solver.status == "pinned" and solver.bound_seconds > 0:
        yield (
            f"status=pinned says that nothing was searched, and its bound is {solver.bound_seconds:.6g} s; a plan that "
            "was not searched for has a bound of 0."
        )


def _paces_come_from_a_run(plan: Plan) -> Iterator[str]:
    """A pace is the ratio of a stage's measured to its predicted seconds, so any but 1 needs the trace of a run."""
    for placement in plan.placements:
        if placement.pace != 1 and "trace" not in plan.digests:
            yield (
                f"{placement.stage}: pace={placement.pace:g} must come from a run, and the plan names no trace of one; "
                "plan the job again."
            )


def _resident_stages(plan: Plan, rank: int) -> tuple[str, ...]:
    return tuple(p.stage for p in plan.placements if rank in plan.pool(p.pool).ranks)


def _equal(plan: Plan, one: float, other: float) -> bool:
    return abs(one - other) <= _TOLERANCE * max(plan.period_seconds, 1e-9)


_NAMES: tuple[Check, ...] = (
    _stages_are_complete,
    _pools_are_named_once,
    _edges_are_the_stage_graph,
    _refits_name_stages,
    _digests_match_the_facts,
    _cost_terms_are_in_range,
    _paces_come_from_a_run,
)
_CHOICES: tuple[Check, ...] = (
    _steps_ahead_fall_along_the_edges,
    _stages_work_ahead_together,
    _staleness_keeps_its_bound,
    _streams_are_of_one_period,
    _sequences_over_periods_are_scored_by_fixed_weights,
    _pools_are_legal,
    _layouts_are_legal,
    _stages_hold_the_layers_assigned_to_them,
    _schedules_are_legal,
)
_CONSEQUENCES: tuple[Check, ...] = (
    _refits_are_complete,
    worker_violations,
    _pins_are_kept,
    _tasks_last_as_long_as_they_cost,
    _inputs_are_ready,
    _ranks_do_one_thing_at_a_time,
    _memory_suffices,
    _host_memory_suffices,
    _the_period_follows_from_the_times,
    _the_gap_is_the_distance_to_the_bound,
    _the_status_matches_the_gap,
)
