"""The record: evaluations, comparisons with the plan, and what a resumed run keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.planner.compile import compile_plan
from meshwright.planner.plan.plan import Plan, read_plan, write_plan
from meshwright.profiles.run_logs import former_plans, log_files
from meshwright.profiles.trace import Span, read_spans, write_spans
from meshwright.runtime.records.record import (
    EvaluationRecord,
    Recorder,
    RunSummary,
)
from meshwright.runtime.records.restarts import NEXT_PLAN
from meshwright.runtime.records.results import PeriodResult
from meshwright.runtime.records.run_lines import elapsed_seconds
from meshwright.runtime.records.version_gap import Gap
from tests.planner.jobs import ToyModel, small_facts


@pytest.fixture(scope="module")
def plan() -> Plan:
    facts = small_facts(ranks_per_node=2)
    found = compile_plan(facts, ToyModel(facts), pins=("actor_generate.layout=dp2", "actor_train.pool=0:1"))
    assert isinstance(found, Plan)
    return found


def span(step: int, name: str, rank: int, seconds: float, kind: str = "stage") -> Span:
    return Span(
        step=step,
        instruction=name,
        kind=kind,
        rank=rank,
        start_seconds=10.0 * step,
        end_seconds=10.0 * step + seconds,
        clock="measured",
    )


def test_an_evaluation_has_the_standard_error_of_its_mean() -> None:
    # Scores 1, 3: mean 2, sample standard deviation sqrt(2), over sqrt(2) prompts: 1.
    evaluation = EvaluationRecord.of(4, {1: 3.0, 0: 1.0}, {0: 5, 1: 9}, Gap())
    assert (evaluation.mean_score, evaluation.standard_error, evaluation.mean_response_tokens) == (2.0, 1.0, 7.0)
    assert evaluation.scores == (1.0, 3.0)


def test_an_improvement_is_judged_by_paired_differences() -> None:
    first = EvaluationRecord.of(0, {0: 0.0, 1: 10.0, 2: 20.0}, {0: 1}, Gap())
    last = EvaluationRecord.of(8, {0: 1.0, 1: 11.0, 2: 22.0}, {0: 1}, Gap())
    summary = RunSummary(
        steps=8,
        comparisons=(),
        evaluations=(first, last),
        tokens_per_second=1.0,
        response_tokens=1.0,
        expected_response_tokens=1.0,
    )
    rise, error = summary.improvement() or (0.0, 0.0)
    assert rise == pytest.approx(4 / 3)
    assert error == pytest.approx(1 / 3)  # differences 1, 1, 2: deviation sqrt(1/3), over sqrt(3)


def test_a_resumed_record_keeps_only_the_steps_before_the_checkpoint(plan: Plan, tmp_path: Path) -> None:
    metrics = {"response_tokens": 4.0, "score": 0.0}
    recorder = Recorder(plan, tmp_path, 3, is_writer=True)
    recorder.open(0)
    for step in range(3):
        began = 2.0 * step
        worked = replace(span(step, "actor_generate", 0, 2.0), start_seconds=began, end_seconds=began + 2.0)
        outcome = PeriodResult(period=step, spans=(worked,), metrics={"actor_train": metrics, "critic_train": {}})
        recorder.record_period([outcome])
    recorder.close()
    again = Recorder(plan, tmp_path, 3, is_writer=True)
    again.open(2)
    again.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert lines[0]["tokens_per_second"] == 4.0 * plan.facts.workload.batch_size / 2.0
    events = json.loads((tmp_path / "trace.chrome.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2


def test_a_line_tells_what_a_generation_in_waves_has_drawn_beside_what_was_learned(plan: Plan, tmp_path: Path) -> None:
    recorder = Recorder(plan, tmp_path, 1, is_writer=True)
    recorder.open(0)
    metrics = {"actor_generate": {"groups_with_signal": 0.5}, "actor_train": {"response_tokens": 4.0}}
    line = recorder.record_period([PeriodResult(period=0, spans=(span(0, "actor_generate", 0, 2.0),), metrics=metrics)])
    assert line is not None
    assert (line["groups_with_signal"], line["response_tokens"]) == (0.5, 4.0)
    recorder.close()


def test_what_a_run_has_to_say_at_its_start_is_said_once(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Recorder(plan, tmp_path, 3, is_writer=True, notes=("changed: ppo.gamma from 1.0 to 0.9",)).open(0)
    assert capsys.readouterr().out.count("changed: ppo.gamma from 1.0 to 0.9") == 1


def test_the_kernels_of_a_run_are_said_at_its_start_and_in_its_summary(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(plan, tmp_path, 1, is_writer=True, kernels="attention sdpa")
    recorder.open(0)
    learned = {"actor_train": {"response_tokens": 4.0}}
    recorder.record_period([PeriodResult(period=0, spans=(span(0, "actor_train", 0, 1.0),), metrics=learned)])
    recorder.close()
    assert capsys.readouterr().out.count("kernels: attention sdpa") == 1
    assert json.loads((tmp_path / "summary.json").read_text())["kernels"] == "attention sdpa"


def test_a_summary_has_the_worst_overhead_and_the_gap_of_the_steps_that_compared(plan: Plan, tmp_path: Path) -> None:
    recorder = Recorder(plan, tmp_path, 3, is_writer=True)
    recorder.open(0)
    gaps = [{"generator_gap": 0.1, "max_generator_gap": 0.5}, {}, {"generator_gap": 0.3, "max_generator_gap": 0.4}]
    for step, gap in enumerate(gaps):
        metrics = {"response_tokens": 4.0, **gap}
        outcomes = [
            PeriodResult(period=step, spans=(span(step, "actor_train", rank, 1.0),), overhead=0.01 * step + 0.1 * rank)
            for rank in range(2)
        ]
        recorder.record_period([replace(outcomes[0], metrics={"actor_train": metrics}), outcomes[1]])
    summary = recorder.close()
    assert summary is not None
    assert summary.overhead == pytest.approx(0.11)
    assert summary.generator_gap is not None
    assert summary.generator_gap.mean == pytest.approx(0.2)
    assert summary.generator_gap.largest == 0.5
    assert summary.generator_gap.measured_on == "training responses"


def record_of(plan: Plan, out: Path, steps: range, **options: int) -> RunSummary:
    """So many steps of an actor that takes longer and longer; it may be a resume."""
    recorder = Recorder(plan, out, steps.stop, is_writer=True, **options)
    recorder.open(steps.start)
    for step in steps:
        spans = tuple(span(step, "actor_train", rank, 1.0 + 0.1 * step + rank) for rank in range(2))
        learned = {"actor_train": {"response_tokens": 4.0}}
        recorder.record_period(
            [PeriodResult(period=step, spans=spans[:1], metrics=learned), PeriodResult(period=step, spans=spans[1:])]
        )
    summary = recorder.close()
    assert summary is not None
    return summary


def test_a_trace_in_segments_is_summarised_and_resumed_as_one(plan: Plan, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    assert record_of(plan, whole, range(60)) == record_of(plan, cut, range(60), segment_bytes=2000)
    assert len(log_files(cut / "trace.jsonl")) > 5
    assert elapsed_seconds(cut) == elapsed_seconds(whole)
    for begin in (55, 20):
        again = record_of(plan, cut, range(begin, 61), segment_bytes=2000)
        assert again == record_of(plan, whole, range(begin, 61))
        assert read_spans(cut / "trace.jsonl") == read_spans(whole / "trace.jsonl")


def test_the_timeline_of_a_long_run_has_its_last_steps(plan: Plan, tmp_path: Path) -> None:
    record_of(plan, tmp_path, range(60), max_spans=21)
    events = json.loads((tmp_path / "trace.chrome.json").read_text())["traceEvents"]
    assert [event["args"]["step"] for event in events if event["ph"] == "X"] == [n for n in range(50, 60) for _ in "ab"]


def test_when_an_evaluation_was_made_stays_known_behind_a_resume(plan: Plan, tmp_path: Path) -> None:
    record_of(plan, tmp_path, range(4))
    made = span(4, "evaluate", 0, 1.0, kind="evaluate")
    write_spans(tmp_path / "trace.jsonl", [span(4, "actor_train", 0, 1.0), made])
    Recorder(plan, tmp_path, 9, is_writer=True).open(4)
    assert [one for one in read_spans(tmp_path / "trace.jsonl") if one.step == 4] == [made]


def test_only_the_writing_rank_leaves_a_record(plan: Plan, tmp_path: Path) -> None:
    recorder = Recorder(plan, tmp_path, 1, is_writer=False)
    recorder.open(0)
    assert recorder.close() is None
    assert not list(tmp_path.iterdir())


def test_what_was_measured_under_an_earlier_plan_is_put_aside(plan: Plan, tmp_path: Path) -> None:
    other = plan.model_copy(update={"pins": ()})
    for number, one in enumerate((plan, plan, other)):
        recorder = Recorder(one, tmp_path, 3, is_writer=True)
        write_plan(tmp_path / NEXT_PLAN, one)
        recorder.open(number)
        recorder.stop()
        write_spans(tmp_path / "trace.jsonl", [span(number, "actor_train", 0, 1.0)])
    assert [found.step for found in read_spans(tmp_path / "trace.jsonl")] == [2]
    assert [found.step for found in read_spans(tmp_path / "trace-until-000002.jsonl")] == [0, 1]
    assert read_plan(tmp_path / "plan-until-000002.json") == plan
    assert read_plan(tmp_path / "plan.json") == other
    assert not (tmp_path / NEXT_PLAN).exists()


def test_plans_that_are_left_at_the_same_step_one_after_the_other_stay_apart(plan: Plan, tmp_path: Path) -> None:
    """The second and the third were killed before their first checkpoint."""
    others = [plan.model_copy(update={"pins": (f"actor_train.micro_batch_size={n}",)}) for n in range(3)]
    for seconds, one in enumerate((plan, *others), start=1):
        recorder = Recorder(one, tmp_path, 30, is_writer=True)
        recorder.open(0 if one is plan else 12)
        recorder.stop()
        write_spans(tmp_path / "trace.jsonl", [span(11 if one is plan else 12, "actor_train", 0, float(seconds))])
    left = former_plans(tmp_path)
    assert [read_plan(one.plan) for one in left] == [plan, *others[:2]]
    assert [[found.seconds for found in read_spans(one.trace)] for one in left] == [[1.0], [2.0], [3.0]]


def test_a_start_that_was_cut_off_while_it_put_a_plan_aside_is_made_good_by_the_next(
    plan: Plan, tmp_path: Path
) -> None:
    recorder = Recorder(plan, tmp_path, 3, is_writer=True, segment_bytes=1)
    recorder.open(0)
    recorder.stop()
    for step in range(2):
        write_spans(tmp_path / "trace.jsonl", [span(step, "actor_train", 0, 1.0)], segment_bytes=1)
    first, _ = log_files(tmp_path / "trace.jsonl")
    first.rename(tmp_path / first.name.replace("trace", "trace-until-000002"))
    Recorder(plan.model_copy(update={"pins": ()}), tmp_path, 3, is_writer=True).open(2)
    [left] = former_plans(tmp_path)
    assert (read_plan(left.plan), [one.step for one in read_spans(left.trace)]) == (plan, [0, 1])
