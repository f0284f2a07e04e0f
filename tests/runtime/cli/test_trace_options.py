"""A job is planned with the lengths that a run has met, or another trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.planner.job.job import read_job, require_job
from meshwright.planner.plan.plan import read_plan
from meshwright.profiles.errors import BadInput
from meshwright.profiles.speculation import Speculation
from meshwright.profiles.trace import read_spans, write_spans
from meshwright.runtime.api.job_inputs import observed_lengths
from tests.runtime.cli.test_calibrate_command import run_of
from tests.runtime.command import Call

GAP = ("--gap", 0.3)


def run_with_tokens(plan: Path, directory: Path, response: float) -> Path:
    """What a run would leave behind whose responses had so many tokens on average, in 2 replicas, and prompts 4."""
    spans = read_spans(run_of(plan, directory) / "trace.jsonl")
    (directory / "trace.jsonl").unlink()
    rows = read_plan(plan).facts.workload.batch_size / 2
    for span in spans:
        tokens = response if span.instruction == "actor_generate" else response + 4
        span.facts["num_tokens"] = tokens * rows  # type: ignore[index]
    write_spans(directory / "trace.jsonl", spans)
    return directory


def test_a_run_tells_its_lengths_and_the_job_their_greatest(call: Call, job: Path, plan: Path, tmp_path: Path) -> None:
    run, output = run_with_tokens(plan, tmp_path / "run", response=5.0), tmp_path / "seen.json"
    assert call("plan", job, "--from-trace", run, "-o", output, *GAP).code == 0
    found, known = read_plan(output), read_job(job)
    assert found.facts.workload.response_lengths.mean == pytest.approx(5.0)
    assert found.facts.workload.prompt_lengths.mean == pytest.approx(4.0)
    assert found.facts.workload.max_tokens == known.workload.max_tokens
    assert call("verify", output).code == 0
    (run / "metrics.jsonl").write_text('{"step": 1, "groups_with_signal": 0.75}\n{"step": 2}\n')
    assert observed_lengths(run).groups_with_signal == (0.75,)
    require_job(found.facts, known, job.parent, lengths_are_observed=found.lengths_are_observed)
    with pytest.raises(BadInput, match=r"the plan was made for another job: workload\.prompt"):
        require_job(found.facts, known, job.parent)


def test_a_run_tells_its_drafts_and_their_plan_is_that_of_the_job(
    call: Call, job: Path, plan: Path, tmp_path: Path
) -> None:
    run, output = run_with_tokens(plan, tmp_path / "run", response=5.0), tmp_path / "seen.json"
    spans = read_spans(run / "trace.jsonl")
    (run / "trace.jsonl").unlink()
    drafted = {"num_row_rounds": 80.0, "num_drafted_0": 40.0, "num_accepted_0": 30.0}
    write_spans(run / "trace.jsonl", [replace(span, facts={**span.facts, **drafted}) for span in spans])
    drafting = job.with_name("drafting.yaml")
    drafting.write_text(job.read_text().replace("workload:\n", "workload:\n  speculation: {acceptance: [0.9, 0.9]}\n"))
    assert call("plan", drafting, "--from-trace", run, "-o", output, *GAP).code == 0
    found = read_plan(output)
    assert found.facts.workload.speculation == Speculation(acceptance=(0.75, 0.9), drafted=0.5)
    require_job(found.facts, read_job(drafting), job.parent, lengths_are_observed=found.lengths_are_observed)


def test_what_else_the_job_says_must_still_be_in_the_plan(call: Call, job: Path, plan: Path, tmp_path: Path) -> None:
    run, output = run_with_tokens(plan, tmp_path / "run", response=5.0), tmp_path / "seen.json"
    assert call("plan", job, "--from-trace", run, "-o", output, *GAP).code == 0
    known = read_job(job)
    response = known.workload.response.model_copy(update={"max": known.workload.response.max + 1})
    longer = known.model_copy(update={"workload": known.workload.model_copy(update={"response": response})})
    with pytest.raises(BadInput, match=r"workload\.response\.max"):
        require_job(read_plan(output).facts, longer, job.parent, lengths_are_observed=True)


def test_devices_are_counted_for_the_lengths_of_another_trainer(call: Call, job: Path, tmp_path: Path) -> None:
    trace = tmp_path / "rollouts.jsonl"
    trace.write_text('{"prompt_tokens": 4, "completion_length": 2}\n')
    keys = ("--trace-field", "response=completion_length")
    outcome = call("fit", job, "--from-trace", trace, *keys, "--sizes", "2", *GAP)
    assert outcome.code == 0
    assert outcome.out != call("fit", job, "--sizes", "2", *GAP).out


def test_a_trace_that_is_no_use_is_refused_in_a_sentence(call: Call, job: Path, plan: Path, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    silent = call("plan", job, "--from-trace", run_of(plan, tmp_path / "silent"), "-o", output)
    assert silent.code == 2
    assert "has no tokens" in silent.err
    missing = call("plan", job, "--from-trace", tmp_path / "none", "-o", output)
    assert missing.code == 2
    assert "does not exist" in missing.err
    alone = call("plan", job, "--trace-field", "prompt=n", "-o", output)
    assert alone.code == 2
    assert "give --from-trace too" in alone.err
    assert not output.exists()
