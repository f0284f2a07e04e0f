"""A run that decodes speculatively learns what one without drafts learns, and measures how many drafts are accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.planner.analysis.observed_lengths import read_lengths
from meshwright.profiles.workload import workload_with_lengths
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.train import run_plan
from tests.runtime.execution.test_train import read_lines
from tests.runtime.small_job import OF_TIME, edited_job, request, write_job

pytestmark = pytest.mark.slow

DRAFT = 2
ACCEPTANCE = {"acceptance": [0.5, 0.5, 0.5, 0.5]}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


def asked(directory: Path, out: str, draft_tokens: int, *, steps: int, resume: bool = False) -> RunRequest:
    """A run of groups of four, whose four prompts are the same in every step."""
    job = edited_job(write_job(directory, num_ranks=1), "workload", speculation=ACCEPTANCE, group_size=4)
    few = (directory / "prompts.jsonl").read_text().splitlines()[:4]
    (directory / "few.jsonl").write_text("\n".join(few) + "\n")
    job = edited_job(job, "data", prompts="few.jsonl", held_out=None)
    pins = f"actor_generate.draft_tokens={draft_tokens}", "actor_generate.generation_slots=8"
    return request(job, directory / out, *pins, steps=steps, resume=resume)


def learned(out: Path) -> list[dict[str, float]]:
    names_of_drafts = {"tokens_per_round", "drafted_share", *(f"acceptance_{n + 1}" for n in range(DRAFT))}
    return [{k: line[k] for k in line.keys() - OF_TIME - names_of_drafts} for line in read_lines(out / "metrics.jsonl")]


def test_drafts_change_nothing_that_is_learned_and_their_acceptance_is_recorded(directory: Path) -> None:
    plain, drafted = asked(directory, "plain", 0, steps=2), asked(directory, "drafted", DRAFT, steps=2)
    for run in (plain, drafted):
        run_plan(run)
    for line, other in zip(learned(plain.out), learned(drafted.out), strict=True):
        assert line == pytest.approx(other, abs=1e-4)
    lines = read_lines(drafted.out / "metrics.jsonl")
    assert all(1 < line["tokens_per_round"] < DRAFT + 1 for line in lines)
    assert all(0 < line["acceptance_1"] <= 1 for line in lines)
    assert lines[1]["drafted_share"] > lines[0]["drafted_share"]  # the second step has a history
    summary = json.loads((drafted.out / "summary.json").read_text())["speculation"]
    assert 0 < summary["drafted"] <= 1
    assert json.loads((plain.out / "summary.json").read_text())["speculation"] is None
    workload = workload_with_lengths(drafted.plan.facts.workload, read_lengths(drafted.out, {}))
    assert workload.speculation is not None
    assert workload.speculation.acceptance[:DRAFT] != tuple(ACCEPTANCE["acceptance"][:DRAFT])
    assert workload.speculation.acceptance[DRAFT:] == (0.5, 0.5)  # not drafted: as the job states it


@pytest.mark.check_all
def test_a_run_that_was_stopped_drafts_on_from_the_same_history(directory: Path) -> None:
    whole = asked(directory, "whole", DRAFT, steps=4)
    run_plan(whole)
    run_plan(asked(directory, "stopped", DRAFT, steps=2))
    stopped = asked(directory, "stopped", DRAFT, steps=4, resume=True)
    run_plan(stopped)
    assert learned(stopped.out) == learned(whole.out)
    lines = [read_lines(run.out / "metrics.jsonl") for run in (whole, stopped)]
    names = "tokens_per_round", "drafted_share", "acceptance_1"
    assert [[line[name] for name in names] for line in lines[0]] == [
        [line[name] for name in names] for line in lines[1]
    ]
