"""The plan command: one job has one plan, what is pinned or forbidden holds, and a mistake gets a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.planner.plan.pin_files import pins_of
from meshwright.planner.plan.plan import read_plan
from tests.runtime.command import Call, exit_code
from tests.runtime.laws.test_own_graphs import write_own
from tests.runtime.rewarded import write_rewarded
from tests.runtime.small_job import edited_job, write_job


@pytest.fixture(scope="module")
def plan(job: Path) -> Path:
    """The best one."""
    path = job.with_name("plan.json")
    assert exit_code("plan", job, "-o", path) == 0
    return path


def test_the_same_job_gives_the_same_bytes(call: Call, job: Path, plan: Path) -> None:
    assert call("plan", job, "-o", job.with_name("again.json")).code == 0
    assert (job.with_name("again.json")).read_bytes() == plan.read_bytes()


def test_what_is_forbidden_is_not_planned_and_the_plan_says_so(call: Call, job: Path, plan: Path) -> None:
    layout = str(read_plan(plan).placement("actor_train").layout)
    path = job.with_name("other.json")
    assert call("plan", job, "-o", path, "--forbid", f"actor_train.layout={layout}").code == 0
    assert str(read_plan(path).placement("actor_train").layout) != layout
    assert read_plan(path).pins == (f"actor_train.layout!={layout}",)
    assert call("verify", path).code == 0


def test_a_value_that_no_choice_has_cannot_be_forbidden(call: Call, job: Path) -> None:
    outcome = call("plan", job, "-o", job.with_name("x.json"), "--forbid", "actor_train.layout=tp3")
    assert outcome.code == 2
    assert "forbid 'actor_train.layout=tp3,pp1,dp1': tp=3 does not divide" in outcome.err


def test_a_graph_of_the_jobs_own_that_is_none_is_refused_in_one_sentence(call: Call, job: Path) -> None:
    text = job.read_text() + (
        "\nalgorithm: {stages: [{name: actor_generate, kind: generation, role: actor, writes: [tokens]},"
        " {name: one, kind: inference, role: critic, reads: [tokens, b], writes: [a]},"
        " {name: two, kind: inference, role: ref, reads: [tokens, a], writes: [b]},"
        " {name: actor_train, kind: training, role: actor, reads: [tokens]}]}\n"
    )
    path = job.with_name("circle.yaml")
    path.write_text(text)
    outcome = call("plan", path, "-o", job.with_name("x.json"))
    assert outcome.code == 2
    assert "algorithm: one reads b before two writes it, and they read from each other in a cycle" in outcome.err
    assert "Traceback" not in outcome.err


def test_a_graph_that_run_would_refuse_is_planned_with_the_reason(call: Call, tmp_path: Path) -> None:
    path = write_own(write_job(tmp_path, num_ranks=1), odd=True, settings="")
    outcome = call("plan", path, "-o", tmp_path / "plan.json")
    assert outcome.code == 0
    assert "note: run refuses this job: algorithm is a graph of the job's own, and no settings say how" in outcome.out


def test_the_best_structures_are_written_side_by_side_and_ranked(call: Call, job: Path) -> None:
    path = job.with_name("ranked.json")
    outcome = call("plan", job, "-o", path, "--top", 2, "--json")
    assert outcome.code == 0
    rows = json.loads(outcome.out)
    assert [row["path"] for row in rows] == [str(path), str(job.with_name("ranked.2.json"))]
    assert rows[0]["simulated_seconds"] <= rows[1]["simulated_seconds"]
    one, other = (read_plan(Path(row["path"])) for row in rows)
    assert [p.layout for p in one.placements] != [p.layout for p in other.placements]
    assert call("verify", path).code == call("verify", rows[1]["path"]).code == 0


def test_a_search_starts_from_another_plan_where_the_job_allows_it(call: Call, job: Path, plan: Path) -> None:
    longer, path = edited_job(job, "workload", batch_size=32), job.with_name("longer.json")
    assert call("plan", longer, "-o", path, "--from", plan).code == 0
    found = read_plan(path)
    assert "start" in found.digests
    assert found.solver.gap <= 0.01
    outcome = call("plan", longer, "-o", path, "--from", plan, "--forbid", "actor_train.pool=0:2")
    assert (outcome.code, "start" in read_plan(path).digests) in {(0, True), (0, False)}
    assert ("the search began anew" in outcome.err) is ("start" not in read_plan(path).digests)


def test_the_lines_of_a_search_end_at_the_gap_of_its_plan(call: Call, job: Path) -> None:
    outcome = call("plan", job, "-o", job.with_name("told.json"), "--json")
    *lines, last = [json.loads(text) for text in outcome.err.splitlines()]
    assert last["main_influences"]["engine"] == json.loads(outcome.out)["facts"]["engine"]
    assert [one["phase"] for one in lines] == sorted(one["phase"] for one in lines)
    assert lines[-1]["gap"] == pytest.approx(json.loads(outcome.out)["solver"]["gap"], abs=1e-4)


def test_a_plan_says_what_fills_its_memory_what_would_come_next_and_what_it_costs(call: Call, job: Path) -> None:
    path = job.with_name("summary.json")
    told = call("plan", job, "-o", path, "--price", 2.5, "--per-steps", 10, "--json")
    summary = json.loads(told.err.splitlines()[-1])["summary"]
    assert summary["cost"]["money"] == pytest.approx(2.5 * summary["cost"]["gpu_hours"])
    assert sum(part["num_bytes"] for part in summary["memory"]) == pytest.approx(
        max(read_plan(path).peak_bytes_per_rank), abs=1
    )
    out = call("plan", job, "-o", path, "--price", 2.5).out
    for text in ("part", "next best layouts", "1,000 steps take", "at 2.5 a GPU-hour"):
        assert text in out
    explained = json.loads(call("explain", path, "--price", 2.5, "--per-steps", 10, "--json").out)
    assert explained["summary"] == summary
    report = job.with_name("summary.html")
    assert call("report", path, "-o", report, "--steps", 2, "--price", 2.5, "--per-steps", 10).code == 0
    page = report.read_text()
    assert f"{summary['cost']['money']:,.2f}" in page
    assert "cost of 10 steps, at 2.5 per GPU-hour" in page
    assert "The fullest rank, part by part" in page


def test_an_assumed_latency_is_named_in_every_output(call: Call, tmp_path: Path) -> None:
    """With --json a sentence stood among the lines of JSON, and the report said nothing."""
    path, report = tmp_path / "assumed.json", tmp_path / "assumed.html"
    job = write_rewarded(tmp_path, {"name": "maths", "function": "maths_answer"})
    outcome = call("plan", job, "-o", path, "--json")
    last = [json.loads(text) for text in outcome.err.splitlines()][-1]
    assert last["latencies"] == {"measured": {}, "assumed": {"reward maths": "0.01 s"}}
    assert json.loads(outcome.out)["facts"]["rewards"][0]["latency_seconds"]["assumed"]
    sentence = "a call of reward maths is assumed to take 0.01 s: state its latency_seconds"
    assert sentence in call("explain", path).out
    assert call("report", path, "-o", report).code == 0
    assert sentence in report.read_text()


def test_what_a_plan_is_most_sensitive_to_is_said_under_it(call: Call, job: Path) -> None:
    said = call("plan", job, "-o", job.with_name("said.json")).out
    assert "generated by meshwright-eager" in said
    assert "most sensitive to " in said
    other = job.with_name("served.yaml")
    other.write_text(f"{job.read_text()}\nengine: vllm\n")
    served = call("plan", other, "-o", job.with_name("served.json")).out
    assert "generated by vllm" in served
    assert "with meshwright-eager the same placements take " in served


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("missing.yaml", None, "does not exist"),
        ("bad.yaml", "models: [unclosed", "is not YAML"),
        ("list.yaml", "- 1\n", "should be an object"),
    ],
)
def test_a_job_that_cannot_be_read_gets_a_sentence(
    call: Call, tmp_path: Path, name: str, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    outcome = call("plan", tmp_path / name, "-o", tmp_path / "plan.json")
    assert outcome.code == 2
    assert said in outcome.err
    assert not (tmp_path / "plan.json").exists()


def test_an_unknown_key_gets_the_nearest_one(call: Call, job: Path) -> None:
    outcome = call("plan", edited_job(job, "workload", batch_sise=8), "-o", job.with_name("x.json"))
    assert outcome.code == 2
    assert "workload.batch_sise" in outcome.err
    assert "did you mean 'batch_size'?" in outcome.err


def test_a_wrong_type_names_its_path_and_value(call: Call, job: Path) -> None:
    outcome = call("plan", edited_job(job, "workload", batch_size="many"), "-o", job.with_name("x.json"))
    assert outcome.code == 2
    assert "workload.batch_size is 'many'" in outcome.err


def test_a_job_that_cannot_fit_exits_3_with_the_binding_limit(call: Call, job: Path) -> None:
    device = {
        "name": "thimble",
        "kind": "cpu",
        "memory_bytes": 100_000,
        "memory_bytes_per_second": 1e10,
        "flops_per_second": {"fp32": 1e10},
        "launch_seconds": 1e-5,
        "source": "made up",
    }
    outcome = call("plan", edited_job(job, "cluster", device=device), "-o", job.with_name("x.json"))
    assert outcome.code == 3
    assert "actor_train needs" in outcome.err
    assert "that the device can use" in outcome.err


def test_more_ranks_than_the_cluster_has_are_refused(call: Call, job: Path) -> None:
    outcome = call("plan", job, "--pin", "actor_train.pool=0:8", "-o", job.with_name("x.json"))
    assert outcome.code == 2
    assert "8" in outcome.err
    assert "2 ranks" in outcome.err


def test_pins_in_a_file_and_the_choices_of_a_plan_are_kept(call: Call, job: Path, plan: Path, tmp_path: Path) -> None:
    pins = tmp_path / "pins.txt"
    pins.write_text("actor_train.layout=tp2  # as before\nref_logprob.pool=0:2\n")
    written = tmp_path / "plan.json"
    assert call("plan", job, "--pins", pins, "--gap", 0.5, "-o", written).code == 0
    found = read_plan(written)
    assert (str(found.choice("actor_train", "layout")), str(found.choice("ref_logprob", "pool"))) == (
        "tp2,pp1,dp1",
        "0:2",
    )
    assert call("plan", job, "--pins", plan, "--gap", 0.5, "-o", written).code == 0
    assert read_plan(written).pins == tuple(sorted(pins_of(read_plan(plan))))
