"""The profile command: one sentence for each mistake, nothing written, and tables of imported operators."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from meshwright.planner.plan.plan import read_plan
from meshwright.planner.plan.reward_workers import host_seconds
from tests.runtime.command import Call
from tests.runtime.environment.servers import Judged, judge
from tests.runtime.rewarded import write_rewarded

EXAMPLES = Path(__file__).parents[3] / "examples"
H100_JOB = EXAMPLES / "70b-64xh100" / "job.yaml"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "name a job.yaml, whose shapes are timed"),
        ((H100_JOB, "--device", "tpu"), "--device 'tpu' is not cpu or cuda"),
        ((H100_JOB, "--device", "h100_sxm"), "goes with --from aiconfigurator"),
        ((H100_JOB, "--device", "cpu"), "--device cpu: the job's cluster has 'h100-sxm'"),
        (("--from", "aiconfigurator"), "name a job, or a device with --device: a100_sxm"),
        (("--from", "aiconfigurator", "--device", "h20_sxm"), "did you mean 'h200_sxm'?"),
        ((H100_JOB, "--from", "aiconfigurator", "--device", "h200_sxm"), "the job's cluster has 'h100-sxm'"),
    ],
)
def test_a_mistake_gets_one_sentence_and_writes_nothing(
    call: Call, tmp_path: Path, arguments: tuple[object, ...], says: str
) -> None:
    outcome = call("profile", *arguments, "-o", tmp_path / "table.json")
    assert outcome.code == 2
    assert says in outcome.err
    assert outcome.err.count("error:") == outcome.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_latency_of_a_judge_that_the_job_leaves_open_is_measured_planned_with_and_run_with(
    call: Call, tmp_path: Path
) -> None:
    table, planned, assumed = (tmp_path / name for name in ("table.json", "plan.json", "assumed.json"))
    with judge(Judged(), seconds=lambda: 0.1) as url:
        job = write_rewarded(tmp_path, {"name": "judge", "url": url})
        outcome = call("profile", job, "-o", table, "--minutes", "0.05")
        assert (outcome.code, outcome.out.count(f"a call of reward {url} takes 0.1")) == (0, 1)
        assert call("plan", job, "-o", assumed).code == 0
        outcome = call("plan", job, "--profile", table, "-o", planned)
        assert (outcome.code, outcome.out.count("a call of reward judge takes 0.1")) == (0, 1)
        assert call("run", planned, job, "--steps", "1", "--out", tmp_path / "run").code == 0
    least, waited = (max(map(host_seconds, read_plan(path).edges)) for path in (assumed, planned))
    assert waited > least + 0.08
    assert read_plan(planned).period_seconds > 0.1


def test_a_job_without_data_is_told_that_its_rewards_were_not_called(call: Call, tmp_path: Path) -> None:
    job = write_rewarded(tmp_path, {"name": "third", "function": "tests.runtime.rewarding:third_word"})
    job.write_text(yaml.safe_dump({**yaml.safe_load(job.read_text()), "data": None}))
    outcome = call("profile", job, "-o", tmp_path / "table.json", "--minutes", "0.05")
    assert outcome.code == 0
    assert "The job has no data to call its rewards and its tool with" in outcome.out


def test_a_module_that_was_not_allowed_is_refused_before_anything_is_measured(call: Call, tmp_path: Path) -> None:
    job = write_rewarded(tmp_path, {"name": "third", "function": "tests.runtime.rewarding:third_word"})
    outcome = call("profile", job, "-o", tmp_path / "table.json", "--minutes", "10")
    assert outcome.code == 2
    assert "give --allow-module tests.runtime.rewarding if you trust it" in outcome.err
