"""Calibration: a run's measured stages correct a table, and what agrees with the table changes nothing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cost_models.blended import cost_model
from meshwright.cost_models.protocol import StageQuery
from meshwright.planner.analysis.calibration import (
    Calibration,
    StageRow,
    calibrate,
    read_run,
    seconds_at_observed_lengths,
)
from meshwright.planner.plan.plan import Plan, write_plan
from meshwright.planner.simulation.simulate import simulate
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.documents import digest
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import VLLM
from meshwright.profiles.harness import TimingResult, points, record
from meshwright.profiles.stages import GENERATE, Role
from meshwright.profiles.table import Provenance, Table, TimedPass, Traffic, TrafficCorrection, read_table, write_table
from meshwright.profiles.trace import Span, write_spans
from meshwright.profiles.workload import Workload
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan
from tests.seeds import cases

DATE = "2026-11-21"
FACTS = small_facts(memory_bytes=2**50)


def profiled() -> Table:
    """Times that grow with rows and tokens; every shape of the job."""
    provenance = Provenance(
        device="toy",
        kind="cpu",
        precision=FACTS.precision,
        driver="Linux 6.1",
        libraries={"torch": "2.13.0"},
        commit="0123abc",
        date=DATE,
        threads_per_rank=1,
        num_ranks=4,
        repeats=3,
    )
    rows = []
    specs = {role: FACTS.models.spec(role) for role in PPO_GRAPH.roles}
    for point in points(PPO_GRAPH, specs, FACTS.workload, FACTS.cluster):
        seconds = 1e-3 * (1 + point.num_layers) * (1 + point.rows) * (1 + (point.tokens + point.context) / 100)
        rows.append(record(point, TimingResult(median_seconds=seconds, spread_seconds=0.0, repeats=3)))
    return Table(provenance=provenance, measurements=tuple(rows))


TABLE = profiled()
PLANS = [random_plan(seed, FACTS, cost_model(FACTS.cluster, FACTS.workload, FACTS.precision, TABLE)) for seed in (2, 4)]


@pytest.fixture(params=PLANS, ids=["seed 2", "seed 4"])
def plan(request: pytest.FixtureRequest) -> Plan:
    found: Plan = request.param
    return found


def predicted(plan: Plan, table: Table | None, workload: Workload | None = None) -> dict[str, float]:
    """Seconds of the plan's stages under a table."""
    model = cost_model(plan.facts.cluster, workload or plan.facts.workload, plan.facts.precision, table)
    return {
        p.stage: model.seconds(
            StageQuery(
                stage=PPO_GRAPH.by_name[p.stage],
                model=plan.facts.models.spec(plan.stage(p.stage).role),
                layout=p.layout,
                schedule=p.schedule,
            )
        ).total
        for p in plan.placements
    }


def trace(plan: Plan, seconds: Callable[[str], float], workload: Workload | None = None) -> tuple[Span, ...]:
    """Three steps in which every rank of a stage takes `seconds`, with the workload's mean tokens."""
    lengths = workload or plan.facts.workload
    num_tokens = {True: lengths.response_lengths.mean, False: lengths.mean_tokens}
    return tuple(
        Span(
            step=step,
            instruction=p.stage,
            kind="stage",
            rank=plan.pool(p.pool).first_rank + rank,
            start_seconds=0.0,
            end_seconds=seconds(p.stage),
            clock="measured",
            facts={}
            if PPO_GRAPH.by_name[p.stage].trains
            else {"num_tokens": num_tokens[PPO_GRAPH.by_name[p.stage].generates] * lengths.batch_size / p.layout.dp},
        )
        for step in range(3)
        for p in plan.placements
        for rank in range(p.layout.num_ranks)
    )


def by_role(stage: str) -> float:
    """Every stage slower by a factor of its role's shape and kind, so that stages that share a factor agree."""
    kind = PPO_GRAPH.by_name[stage]
    return (1.5 if kind.role in (Role.ACTOR, Role.REF) else 1.25) * (2.0 if kind.trains else 1.0)


def corrections(found: Calibration) -> set[float]:
    return {correction.factor for correction in found.table.corrections}


@pytest.mark.parametrize("table", [TABLE, None], ids=["profiled", "analytic"])
def test_a_run_that_took_what_was_predicted_changes_nothing(plan: Plan, table: Table | None) -> None:
    seconds = predicted(plan, table)
    found = calibrate(plan, trace(plan, seconds.__getitem__), table, date=DATE)
    assert corrections(found) == {1.0}
    assert predicted(plan, found.table) == seconds


def test_costs_that_a_calibration_leaves_alone_keep_their_source(plan: Plan) -> None:
    found = calibrate(plan, trace(plan, predicted(plan, TABLE).__getitem__), TABLE, date=DATE)
    model = cost_model(plan.facts.cluster, plan.facts.workload, plan.facts.precision, found.table)
    for p in plan.placements:
        spec = plan.facts.models.spec(plan.stage(p.stage).role)
        query = StageQuery(stage=PPO_GRAPH.by_name[p.stage], model=spec, layout=p.layout, schedule=p.schedule)
        assert model.seconds(query) == p.cost


@pytest.mark.parametrize("table", [TABLE, None], ids=["profiled", "analytic"])
def test_a_calibrated_table_predicts_the_medians_of_the_run(plan: Plan, table: Table | None) -> None:
    """Training is predicted right also where it runs the forward pass again, which has a factor of its own."""
    before = predicted(plan, table)
    spans = trace(plan, lambda stage: before[stage] + 1.0)
    found = calibrate(plan, spans, table, date=DATE)
    after = predicted(plan, found.table)
    alone = {c.stages[0] for c in found.table.corrections if len(c.stages) == 1}
    assert {"actor_generate", "actor_train", "critic_train"} <= alone
    for row in found.rows[:-1]:
        assert row.before_seconds == pytest.approx(before[row.stage])
        assert row.after_seconds == after[row.stage]
        if row.stage in alone:
            assert row.after_seconds == pytest.approx(row.measured_seconds, rel=1e-6)
    for stages in {c.stages for c in found.table.corrections}:
        measured = sum(before[stage] + 1.0 for stage in stages)
        assert sum(after[stage] for stage in stages) == pytest.approx(measured, rel=1e-6)


def test_calibrating_again_with_the_same_run_changes_nothing_more(plan: Plan) -> None:
    before = predicted(plan, TABLE)
    spans = trace(plan, lambda stage: before[stage] * 3)
    once = calibrate(plan, spans, TABLE, date=DATE)
    twice = calibrate(plan, spans, once.table, date=DATE)
    new = twice.table.corrections[len(once.table.corrections) :]
    assert twice.table.corrections[: len(new)] == once.table.corrections
    assert [correction.factor for correction in new] == pytest.approx([1.0] * len(new), abs=1e-8)


def test_shorter_responses_are_not_a_faster_machine(plan: Plan) -> None:
    workload = plan.facts.workload
    shorter = workload.model_copy(
        update={"response": workload.response.with_mean(0.5 * workload.response_lengths.mean)}
    )
    seconds = predicted(plan, TABLE, shorter)
    assert seconds["actor_generate"] < 0.7 * predicted(plan, TABLE)["actor_generate"]
    found = calibrate(plan, trace(plan, seconds.__getitem__, shorter), TABLE, date=DATE)
    assert list(corrections(found)) == pytest.approx([1.0] * len(corrections(found)), rel=1e-6)
    assert found.response_tokens == pytest.approx(found.expected_response_tokens / 2)


def test_the_seconds_at_the_lengths_of_a_run_are_those_that_a_calibration_starts_from(plan: Plan) -> None:
    workload = plan.facts.workload
    shorter = workload.model_copy(
        update={"response": workload.response.with_mean(0.5 * workload.response_lengths.mean)}
    )
    spans = trace(plan, predicted(plan, TABLE, shorter).__getitem__, shorter)
    before = {row.stage: row.before_seconds for row in calibrate(plan, spans, TABLE, date=DATE).rows}
    found = seconds_at_observed_lengths(plan, spans, TABLE)
    assert {name: found.get(name, found["refit"]) for name in before} == pytest.approx(before)
    assert found[GENERATE] < plan.placement(GENERATE).cost.total


def test_a_correction_says_where_it_comes_from_and_measurements_stay(plan: Plan, tmp_path: Path) -> None:
    before = predicted(plan, TABLE)
    found = calibrate(plan, trace(plan, lambda stage: before[stage] * by_role(stage)), TABLE, date=DATE).table
    assert found.measurements == TABLE.measurements
    assert found.provenance == TABLE.provenance
    assert {(c.plan, c.num_steps, c.date) for c in found.corrections} == {(digest(plan), 2, DATE)}
    assert {c.timed_pass for c in found.corrections} == set(TimedPass)
    write_table(tmp_path / "t.json", found)
    assert read_table(tmp_path / "t.json") == found


def test_a_stage_that_took_less_than_its_messages_is_refused() -> None:
    plan = next(p for p in PLANS if any(q.layout.num_ranks > 1 for q in p.placements))
    with pytest.raises(BadInput, match=r"messages and scheduling alone are predicted to take .* profile this machine"):
        calibrate(plan, trace(plan, lambda _: 1e-12), TABLE, date=DATE)


def test_a_plan_that_was_made_from_a_table_needs_it(plan: Plan) -> None:
    made = plan.model_copy(update={"digests": {**plan.digests, "profile": digest(TABLE)}})
    with pytest.raises(BadInput, match="give it with --profile"):
        calibrate(made, trace(made, lambda _: 1.0), None, date=DATE)


def test_a_table_of_another_device_is_refused(plan: Plan) -> None:
    other = TABLE.model_copy(update={"provenance": TABLE.provenance.model_copy(update={"device": "h200"})})
    with pytest.raises(BadInput, match="measured on 'h200'"):
        calibrate(plan, trace(plan, lambda _: 1.0), other, date=DATE)


def test_a_run_is_read_with_its_plan_and_another_plan_is_refused(plan: Plan, tmp_path: Path) -> None:
    spans = trace(plan, lambda _: 1.0)
    write_plan(tmp_path / "plan.json", plan)
    write_spans(tmp_path / "trace.jsonl", spans)
    assert read_run(plan, tmp_path) == spans
    with pytest.raises(BadInput, match="is a run of another plan"):
        read_run(plan.model_copy(update={"pins": ("x",)}), tmp_path)


def test_a_directory_without_a_run_and_a_trace_that_was_cut_short_get_a_sentence(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"holds no plan\.json"):
        read_run(plan, tmp_path)
    write_plan(tmp_path / "plan.json", plan)
    with pytest.raises(BadInput, match=r"trace\.jsonl does not exist"):
        read_run(plan, tmp_path)
    write_spans(tmp_path / "trace.jsonl", trace(plan, lambda _: 1.0))
    text = (tmp_path / "trace.jsonl").read_text()
    (tmp_path / "trace.jsonl").write_text(text[:-40])
    with pytest.raises(BadInput, match=r"is not a span; if the file was cut short, delete that line"):
        read_run(plan, tmp_path)


def test_rows_come_in_the_order_of_the_plan(plan: Plan) -> None:
    apart = tuple(
        replace(span, start_seconds=1e7 * span.step, end_seconds=1e7 * span.step + span.seconds)
        for span in trace(plan, lambda _: 1e6)
    )
    found = calibrate(plan, apart, TABLE, date=DATE)
    starts = [plan.placement(row.stage).start_seconds for row in found.rows[:-1]]
    assert starts == sorted(starts)
    assert found.rows[-1].stage == "step"
    assert all(isinstance(row, StageRow) and row.measured_seconds == 1e6 for row in found.rows)


def test_a_trace_that_was_rehearsed_is_refused(plan: Plan) -> None:
    rehearsed = tuple(replace(item, clock="rehearsed") for item in trace(plan, lambda _: 1.0))
    with pytest.raises(BadInput, match="the trace is rehearsed and not measured"):
        calibrate(plan, rehearsed, TABLE, date=DATE)


def simulated(plan: Plan, slower: Callable[[Span], float] = lambda _: 1.0) -> tuple[Span, ...]:
    """What our simulation of the plan at its planned durations leaves behind, as if it had been measured."""
    spans = simulate(plan, steps=3, traced=True).spans
    return tuple(
        replace(span, clock="measured", end_seconds=span.start_seconds + slower(span) * span.seconds) for span in spans
    )


def synchronous_plans() -> list[Plan]:
    model = cost_model(FACTS.cluster, FACTS.workload, FACTS.precision, TABLE)
    found = [random_plan(seed, FACTS, model) for seed in range(1, 13)]
    return [plan for plan in found if not any(p.steps_ahead for p in plan.placements)]


SYNCHRONOUS = synchronous_plans()
FEW = 4


@cases("plan", SYNCHRONOUS, few=FEW)
def test_calibrating_on_our_own_simulated_trace_changes_nothing(plan: Plan) -> None:
    """Stages, collectives, refits and the step: all are as planned."""
    found = calibrate(plan, simulated(plan), TABLE, date=DATE)
    assert corrections(found) == {1.0}
    assert {(c.factor, c.seconds) for c in found.table.traffic} <= {(1.0, 0.0)}
    for row in found.rows:
        assert row.after_seconds == row.before_seconds == pytest.approx(row.planned_seconds)
        assert row.measured_seconds == pytest.approx(row.planned_seconds)


def test_some_of_these_plans_refit_and_some_exchange() -> None:
    assert any(plan.refits for plan in SYNCHRONOUS)
    assert any(
        "tensor-parallel collectives" in {t.name for t in p.cost.terms} for q in SYNCHRONOUS for p in q.placements
    )


def test_refits_that_took_longer_are_predicted_so() -> None:
    plan = next(plan for plan in SYNCHRONOUS if plan.refits)
    found = calibrate(plan, simulated(plan, lambda span: 3.0 if span.kind == "refit" else 1.0), TABLE, date=DATE)
    row = next(row for row in found.rows if row.stage == "refits")
    assert row.measured_seconds == pytest.approx(3 * row.before_seconds)
    assert row.after_seconds == pytest.approx(row.measured_seconds)
    assert [c.factor for c in found.table.traffic if c.traffic is Traffic.REFIT] == pytest.approx([3.0])
    assert corrections(found) == {1.0}


@cases("plan", SYNCHRONOUS, few=FEW)
def test_a_step_that_took_longer_than_its_stages_is_charged_to_handovers(plan: Plan) -> None:
    seconds = predicted(plan, TABLE)
    late = 0.5 * plan.period_seconds
    last = max(plan.placements, key=lambda p: p.end_seconds).stage
    spans = tuple(
        replace(span, start_seconds=span.start_seconds + waited, end_seconds=span.end_seconds + waited)
        for span in simulated(plan)
        for waited in [late * (span.step + (span.instruction == last))]
    )
    found = calibrate(plan, spans, TABLE, date=DATE)
    assert found.rows[-1].measured_seconds == pytest.approx(1.5 * plan.period_seconds)
    assert found.rows[-1].after_seconds == pytest.approx(found.rows[-1].measured_seconds)
    assert predicted(plan, found.table) == seconds
    assert [c.traffic for c in found.table.traffic if c.seconds] == [Traffic.TRANSFER]


def test_collectives_are_corrected_where_stages_of_one_shape_exchange_differently() -> None:
    """A pipelined forward stage of the critic's shape sends hidden states and one beside it does not."""
    slow = TABLE.model_copy(
        update={
            "traffic": (TrafficCorrection(traffic=Traffic.COLLECTIVE, factor=1e4, plan="a", num_steps=2, date=DATE),)
        }
    )
    told = 0
    for plan in SYNCHRONOUS:
        found = calibrate(plan, trace(plan, predicted(plan, slow).__getitem__), TABLE, date=DATE)
        factors = [c.factor for c in found.table.traffic if c.traffic is Traffic.COLLECTIVE]
        if factors:
            told += 1
            assert factors == pytest.approx([1e4], rel=1e-6)
            assert predicted(plan, found.table) == pytest.approx(predicted(plan, slow), rel=1e-6)
    assert told


def test_corrections_of_traffic_say_where_they_come_from_and_follow_those_before(tmp_path: Path) -> None:
    plan = next(plan for plan in SYNCHRONOUS if plan.refits)
    spans = simulated(plan, lambda span: 3.0 if span.kind == "refit" else 1.0)
    once = calibrate(plan, spans, TABLE, date=DATE).table
    twice = calibrate(plan, spans, once, date="2026-11-22").table
    write_table(tmp_path / "t.json", twice)
    assert read_table(tmp_path / "t.json") == twice
    assert twice.traffic[: len(once.traffic)] == once.traffic
    assert {(c.plan, c.num_steps) for c in twice.traffic} == {(digest(plan), 2)}
    assert [c.date for c in twice.traffic if c.traffic is Traffic.REFIT] == [DATE, "2026-11-22"]
    assert [c.factor for c in twice.traffic if c.traffic is Traffic.REFIT] == pytest.approx([3.0, 1.0])


def test_a_run_with_an_engine_in_its_own_process_corrects_its_passes_alone() -> None:
    """It was predicted by equations; our own engine's prefills and decode steps stay as they were measured."""
    facts = FACTS.model_copy(update={"engine": VLLM})
    plan = random_plan(1, facts, cost_model(facts.cluster, facts.workload, facts.precision, TABLE, VLLM))
    longer = {p.stage: p.cost.total + (1.0 if p.stage == GENERATE else 0.0) for p in plan.placements}
    found = calibrate(plan, trace(plan, longer.__getitem__), TABLE, date=DATE)
    generating = {c.engine: c.factor for c in found.table.corrections if GENERATE in c.stages}
    assert set(generating) == {VLLM}
    assert generating[VLLM] > 1.0
    assert {c.engine for c in found.table.corrections if GENERATE not in c.stages} == {None}
    [row] = [row for row in found.rows if row.stage == GENERATE]
    assert row.after_seconds == pytest.approx(row.measured_seconds, rel=1e-6)
    assert predicted(plan, found.table)[GENERATE] == predicted(plan, TABLE)[GENERATE]
