"""What a run prints about itself."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from meshwright.planner.analysis.trace_analysis import Comparison
from meshwright.profiles.schedule import Offload, Recompute, Schedule
from meshwright.runtime.cli.view_plan import print_plan
from meshwright.runtime.cli.view_run import print_run_summary
from meshwright.runtime.records.record import RunSummary
from meshwright.runtime.records.resource_use import MemoryUse
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan


def printed(
    capsys: pytest.CaptureFixture[str],
    *comparisons: Comparison,
    response_tokens: float = 10.0,
    at_observed_lengths: Mapping[str, float] | None = None,
) -> str:
    step = Comparison(name="step", predicted_seconds=1.0, measured_seconds=0.8)
    summary = RunSummary(
        steps=4,
        comparisons=(*comparisons, step),
        evaluations=(),
        tokens_per_second=100.0,
        response_tokens=response_tokens,
        expected_response_tokens=12.0,
        memory=(MemoryUse(stage="actor_train", planned_bytes=2**30, measured_bytes=2**29),),
    )
    print_run_summary(summary, Path("out"), lambda: at_observed_lengths or {})
    return capsys.readouterr().out


def line(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


def test_what_takes_next_to_nothing_of_a_step_has_no_error_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    train = Comparison(name="actor_train", predicted_seconds=0.5, measured_seconds=0.4)
    refit = Comparison(name="refit", predicted_seconds=0.01, measured_seconds=0.002)
    unseen = Comparison(name="reward_score", predicted_seconds=0.1, measured_seconds=0.0)
    text = printed(capsys, train, refit, unseen)
    assert line(text, "actor_train") == ["actor_train", "0.500", "0.400", "+25.0%"]
    assert line(text, "refit") == ["refit", "0.010", "0.002"]
    assert line(text, "reward_score") == ["reward_score", "0.100", "0.000"]
    assert line(text, "step") == ["step", "1.000", "0.800", "+25.0%"]


def test_planned_memory_says_that_it_is_for_the_longest_rows(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys)
    assert ["actor_train", "1.00", "GiB", "512.0", "MiB"] in [line.split() for line in text.splitlines()]
    assert "planned for sequences of maximum length" in " ".join(text.split())


def test_where_responses_had_other_lengths_it_is_said_what_predicts_for_those(
    capsys: pytest.CaptureFixture[str],
) -> None:
    way = "the plan expects 12; `meshwright calibrate` predicts for the observed lengths"
    assert way in " ".join(printed(capsys, response_tokens=10.0).split())
    assert "calibrate" not in printed(capsys, response_tokens=11.5)


def test_where_responses_had_other_lengths_what_is_predicted_for_those_is_compared_with_what_was_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train = Comparison(name="actor_train", predicted_seconds=0.5, measured_seconds=0.4)
    at_observed_lengths = {"actor_train": 0.42, "step": 0.88}
    text = printed(capsys, train, at_observed_lengths=at_observed_lengths)
    assert line(text, "actor_train") == ["actor_train", "0.500", "0.420", "0.400", "+5.0%"]
    assert line(text, "step") == ["step", "1.000", "0.880", "0.800", "+10.0%"]
    assert "the error is that of the prediction at the observed lengths" in " ".join(text.split())
    as_planned = printed(capsys, train, response_tokens=11.5, at_observed_lengths=at_observed_lengths)
    assert line(as_planned, "step") == ["step", "1.000", "0.800", "+25.0%"]


SCHEDULES = {
    "actor_generate": Schedule(generation_slots=64, batches_in_flight=3),
    "reward_score": Schedule(micro_batch_size=8, chunk_tokens=32),
    "ref_logprob": Schedule(micro_batch_size=8, offload=Offload.WEIGHTS),
    "actor_train": Schedule(micro_batch_size=2, recompute=Recompute.SELECTIVE, offload=Offload.OPTIMIZER),
}


def test_a_plan_says_all_that_its_stages_do_and_cuts_nothing_off(capsys: pytest.CaptureFixture[str]) -> None:
    found = random_plan(1, small_facts(memory_bytes=2**50))
    placements = tuple(
        p.model_copy(
            update={"schedule": SCHEDULES.get(p.stage, p.schedule), "steps_ahead": int(p.stage == "actor_generate")}
        )
        for p in found.placements
    )
    print_plan(found.model_copy(update={"placements": placements}), Path("plan.json"))
    lines = capsys.readouterr().out.splitlines()
    place = next(line.index("schedule") for line in lines if "schedule" in line)
    schedules = " ".join(" ".join(line[place:].split()) for line in lines)
    assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in lines)
    for told in (
        "64 slots, 3 batches in flight, 1 ahead",
        "8 rows, chunks of 32 tokens",
        "8 rows, weights offloaded",
        "2 rows, selective recomputation, optimizer offloaded",
    ):
        assert told in schedules
    assert any("ahead counts steps before training" in line for line in lines)
