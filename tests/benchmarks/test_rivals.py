"""Both sides of the comparison with TRL are told the same job, and are counted in the same way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.rivals import environment, jobs
from benchmarks.rivals.__main__ import Found, Run, Step, merged, report
from benchmarks.rivals.processor import ProcessorTime
from meshwright.planner.job.job import read_job
from meshwright.profiles.errors import BadInput


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `shared` takes of the demo's models: what ends a response."""
    build = tmp_path / "build"
    (build / "actor").mkdir(parents=True)
    for name in ("config.json", "generation_config.json"):
        (build / "actor" / name).write_text(json.dumps({"eos_token_id": 257, "pad_token_id": 258}))
    monkeypatch.setattr(jobs, "BUILD", build)
    monkeypatch.setattr("benchmarks.demo.BUILD", build)
    return build


def ends(actor: Path) -> set[int]:
    return {
        json.loads((actor / name).read_text())["eos_token_id"] for name in ("config.json", "generation_config.json")
    }


def test_both_sides_are_told_the_same_batches_rates_and_lengths(demo: Path, tmp_path: Path) -> None:
    found = jobs.shared("tail", tmp_path / "tail")
    ours, theirs = read_job(found.path), found.for_trl(steps=7, threads=2)
    assert theirs["batch_size"] == ours.workload.batch_size
    assert theirs["num_minibatches"] == ours.workload.num_minibatches
    assert theirs["num_epochs"] == ours.workload.num_epochs
    assert theirs["longest_response"] == ours.workload.response.max
    assert ours.ppo is not None
    assert theirs["learning_rate"] == ours.ppo.actor_learning_rate == ours.ppo.critic_learning_rate
    assert (theirs["kl_coefficient"], theirs["gae_lambda"]) == (ours.ppo.kl_coefficient, ours.ppo.gae_lambda)
    assert (ours.ppo.temperature, ours.ppo.clip_ratio, ours.ppo.value_clip, ours.ppo.gamma) == (1.0, 0.2, 0.2, 1.0)
    assert (theirs["steps"], theirs["threads"]) == (7, 2)


def test_nothing_but_length_ends_a_response_of_fixed_length_on_either_side(demo: Path, tmp_path: Path) -> None:
    fixed, tail = (jobs.shared(name, tmp_path / name) for name in ("fixed", "tail"))
    assert (ends(fixed.actor), fixed.for_trl(steps=1, threads=1)["ends"]) == ({258}, False)
    assert (ends(tail.actor), tail.for_trl(steps=1, threads=1)["ends"]) == ({257}, True)
    assert ends(demo / "actor") == {257}


@pytest.mark.usefixtures("demo")
def test_the_runs_of_another_call_are_not_mixed_with_these(tmp_path: Path) -> None:
    jobs.shared("tail", tmp_path / "tail")
    with pytest.raises(
        BadInput, match=r"tail has the runs of another call, which are not mixed; give another --out\.$"
    ):
        jobs.shared("tail", tmp_path / "tail")


def test_a_step_of_several_processes_takes_as_long_as_the_slowest_and_has_the_tokens_of_all() -> None:
    found = merged([[Step(1.0, 10), Step(2.0, 20)], [Step(1.5, 30), Step(1.0, 40)]])
    assert found == [Step(1.5, 40), Step(2.0, 60)]
    assert Run(found, 2.5).rate == pytest.approx(100 / 3.5)
    assert Run(found, 2.5).processor_rate == pytest.approx(40)


def test_a_report_compares_pair_by_pair_with_the_first_side() -> None:
    slow, fast = Run([Step(2.0, 100.0)], 1.0), Run([Step(0.5, 100.0)], 0.25)
    runs = {"TRL": [slow, Run([Step(1.0, 100.0)], 1.0)], "ours": [fast, fast]}
    text = report({"fixed": Found({"TRL": slow}, runs)}, pairs=2, steps=1)
    assert "| TRL | 75 | 1.00 (1.00 to 1.00) | 100 | 1.00 (1.00 to 1.00) | 1.50 | 100 |" in text
    assert "| ours | 200 | 3.00 (2.00 to 4.00) | 400 | 4.00 (4.00 to 4.00) | 0.50 | 100 |" in text
    assert "trl 1.12.0" in text
    assert "50 and 100 (TRL)" in text


def test_processor_time_is_counted_between_two_lines_of_a_run(tmp_path: Path) -> None:
    steps, found = tmp_path / "steps", []
    working = "import sys, time\nfor seconds in (0.1, 0.4):\n    t = time.process_time()\n"
    working += "    while time.process_time() - t < seconds: pass\n    print(flush=True)\n    sys.stdin.readline()\n"
    command = ["sh", "-c", '"$0" -c "$1"; true', sys.executable, working]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        spent = ProcessorTime(steps, psutil.Process(process.pid))
        for _ in range(2):
            found.append(process.stdout.readline())
            steps.write_text("".join(found))
            spent.look()
            process.stdin.write("\n")
            process.stdin.flush()
    assert spent.seconds(1, 2) == pytest.approx(0.4, abs=0.06)


def test_an_environment_that_was_made_as_the_list_says_is_taken(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(environment.REQUIREMENTS.read_text())
    assert environment.python_of(tmp_path) == tmp_path / "bin" / "python"


def test_every_package_of_the_list_is_pinned() -> None:
    found = environment.pins(environment.REQUIREMENTS.read_text())
    assert found["trl"] == "1.12.0"
    assert all(found.values())


@pytest.mark.check_all
def test_an_environment_that_cannot_be_had_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tmp_path / "requirements.txt"
    wanted.write_text("no-such-package-of-anyone==1\n")
    monkeypatch.setattr(environment, "REQUIREMENTS", wanted)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(BadInput, match=r"pip could not install .*requirements.txt"):
        environment.python_of(tmp_path / "made")
