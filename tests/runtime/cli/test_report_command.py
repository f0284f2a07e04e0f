"""The report command: it draws a plan with its runs, and refuses what it cannot draw in one sentence."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.cost_models.blended import cost_model
from meshwright.planner.plan.plan import Plan, read_plan, write_plan
from meshwright.planner.simulation.simulate import simulate
from meshwright.profiles.trace import write_spans
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan
from tests.runtime.command import Call


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    write_plan(path, small_plan(1))
    return path


def small_plan(seed: int) -> Plan:
    facts = small_facts(ranks_per_node=2, batch_size=4, memory_bytes=2**34)
    return random_plan(seed, facts, cost_model(facts.cluster, facts.workload, facts.precision))


def run_of(path: Path, directory: Path, clock: str = "measured") -> Path:
    """What a run that went as simulated leaves behind."""
    directory.mkdir()
    plan = read_plan(path)
    write_plan(directory / "plan.json", plan)
    spans = simulate(plan, steps=3, traced=True).spans
    write_spans(directory / "trace.jsonl", [replace(span, clock=clock) for span in spans])
    return directory


def test_a_plan_is_drawn_with_its_runs(call: Call, plan: Path, tmp_path: Path) -> None:
    runs = run_of(plan, tmp_path / "run"), run_of(plan, tmp_path / "practice", "rehearsed")
    page = tmp_path / "new" / "report.html"
    outcome = call("report", plan, *runs, "-o", page, "--steps", 3)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(f"{page}: ")
    text = page.read_text()
    for run, clock in zip(runs, ("MEASURED", "REHEARSAL"), strict=True):
        assert f"{clock} {run} s" in text
    assert "3 steps with sampled durations" in text


def test_the_simulation_and_all_runs_are_one_timeline(call: Call, plan: Path, tmp_path: Path) -> None:
    runs = run_of(plan, tmp_path / "run"), run_of(plan, tmp_path / "practice", "rehearsed")
    trace = tmp_path / "trace.json"
    assert call("report", plan, *runs, "-o", tmp_path / "report.html", "--trace", trace).code == 0
    events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["SIMULATED", f"measured {runs[0]}", f"REHEARSED {runs[1]}"]
    starts, ends = (Counter(e["id"] for e in events if e["ph"] == phase) for phase in "sf")
    assert starts == ends
    assert {event["pid"] for event in events if event["ph"] == "C"} == {0, 1, 2}


def test_the_job_is_planned_on_other_numbers_of_ranks(call: Call, plan: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert call("report", plan, "-o", page, "--sizes", "1,2", "--steps", 1).code == 0
    assert page.read_text().count("<circle") == 2


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ("3", "not a number of whole nodes of 2 ranks; use 2 or 4."),
        ("8,many", "not a list of whole numbers"),
        ("0", "use 1"),
    ],
)
def test_sizes_that_no_cluster_has_are_refused(call: Call, plan: Path, tmp_path: Path, sizes: str, said: str) -> None:
    outcome = call("report", plan, "-o", tmp_path / "report.html", "--sizes", sizes)
    assert outcome.code == 2
    assert said in outcome.err


def refused(call: Call, *arguments: object) -> str:
    """The one sentence of a refusal."""
    outcome = call("report", *arguments)
    assert outcome.code == 2
    (sentence,) = outcome.err.splitlines()
    return sentence


def test_a_trace_that_was_cut_short_is_told_the_line(call: Call, plan: Path, tmp_path: Path) -> None:
    run = run_of(plan, tmp_path / "run")
    text = (run / "trace.jsonl").read_text()
    (run / "trace.jsonl").write_text(text[:-40])
    sentence = refused(call, plan, run, "-o", tmp_path / "report.html")
    assert f"line {len(text.splitlines())} is not a span; if the file was cut short, delete that line." in sentence
    assert not (tmp_path / "report.html").exists()


def test_a_trace_without_a_step_is_refused(call: Call, plan: Path, tmp_path: Path) -> None:
    run = run_of(plan, tmp_path / "run")
    (run / "trace.jsonl").write_text("")
    assert "has no step that was trained; let the run finish one." in refused(call, plan, run)


def test_a_directory_without_a_trace_is_refused(call: Call, plan: Path, tmp_path: Path) -> None:
    assert f"{tmp_path} holds no trace.jsonl; give the --out of" in refused(call, plan, tmp_path)
    assert "nowhere is not a directory; give the --out of" in refused(call, plan, tmp_path / "nowhere")


def test_a_run_of_another_plan_and_a_run_given_twice_are_refused(call: Call, plan: Path, tmp_path: Path) -> None:
    run = run_of(plan, tmp_path / "run")
    assert "is given twice" in refused(call, plan, run, tmp_path / "." / "run")
    write_plan(run / "plan.json", small_plan(2))
    assert "is a run of another plan; report the plan.json that it holds." in refused(call, plan, run)


def test_a_plan_of_another_schema_version_is_refused(call: Call, plan: Path, tmp_path: Path) -> None:
    plan.write_text(json.dumps({**json.loads(plan.read_text()), "schema_version": 99}))
    assert "schema_version=99 is not the" in refused(call, plan, "-o", tmp_path / "report.html")


@pytest.mark.parametrize("option", ["-o", "--trace"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_drawn(
    call: Call, plan: Path, tmp_path: Path, option: str
) -> None:
    occupied = plan / "report.html"  # the plan is a file
    others = [] if option == "-o" else ["-o", tmp_path / "report.html"]
    assert "report.html cannot be written; name a file in a directory" in refused(call, plan, option, occupied, *others)
    assert "cannot be written" in refused(call, plan, option, tmp_path, *others)
    assert not (tmp_path / "report.html").exists()


def test_a_what_if_over_a_range_is_plotted(call: Call, plan: Path, tmp_path: Path) -> None:
    page = tmp_path / "plot.html"
    outcome = call("whatif", plan, "--set", "workload.response.fixed=32,64", "--plot", page)
    assert outcome.code == 0
    assert outcome.out.rstrip().endswith("open it in a browser")
    assert page.read_text().count("<circle") == 4


@pytest.mark.parametrize(
    ("setting", "name", "said"),
    [
        ("workload.response.fixed=32", "plot.html", "--plot needs a field with several values"),
        ("workload.response.fixed=32,64", "plot.png", "is not an HTML file; name one that ends in .html."),
        ("workload.response.fixed=32,64", "plan.json/plot.html", "cannot be written"),
        ("workload.respons.fixed=32,64", "plot.html", "did you mean"),
    ],
)
def test_a_plot_that_cannot_be_drawn_is_refused(call: Call, plan: Path, setting: str, name: str, said: str) -> None:
    outcome = call("whatif", plan, "--set", setting, "--plot", plan.parent / name)
    assert outcome.code == 2
    assert said in outcome.err
    assert not plan.with_name("plot.html").exists()


@pytest.mark.check_all
def test_a_rehearsal_leaves_a_run_that_the_report_shows(call: Call, plan: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "practice", tmp_path / "report.html"
    arguments = ("rehearse", plan, "--steps", 2, "--speed", 1, "--ranks-per-process", 2, "--out", out)
    assert call(*arguments).code == 0
    assert call("report", plan, out, "-o", page).code == 0
    assert f"REHEARSAL {out} s" in page.read_text()
    again = call(*arguments)
    assert again.code == 2
    assert "holds the trace of a run, and nothing is overwritten; name a new directory." in again.err
