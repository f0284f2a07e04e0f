"""Two plans of a job are compared in a table and in a picture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from meshwright.profiles.algorithms import PPO_GRAPH

EXAMPLES = Path(__file__).parents[2] / "examples"


def compared(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLES / "compare.py", EXAMPLES / "7b-8xa100-80gb" / "job.yaml", *arguments]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)


def test_a_smaller_batch_takes_less_time_and_both_plans_are_drawn(tmp_path: Path) -> None:
    output = tmp_path / "compared.html"
    found = compared("workload.batch_size=512", "--gap", 0.3, "-o", output)
    assert (found.returncode, found.stderr) == (0, "")
    rows = [line.split() for line in found.stdout.splitlines()]
    assert rows[0] == ["as", "it", "is", "with", "workload.batch_size=512"]
    _, _, before, _, after, _ = next(row for row in rows if row[:2] == ["planned", "step"])
    assert float(after) < float(before)
    assert {row[0] for row in rows} >= {stage.name for stage in PPO_GRAPH.stages}
    page = output.read_text()
    assert "The job as it is and with workload.batch_size=512" in page
    assert all(page.count(f"<title>{stage.name}: ") == 2 for stage in PPO_GRAPH.stages)


def test_what_cannot_be_compared_is_told_in_one_sentence(tmp_path: Path) -> None:
    unknown = compared("workload.batch=512", "-o", tmp_path / "x.html")
    assert unknown.returncode == 1
    assert unknown.stderr.startswith("error: --set workload.batch: the plan's facts have no such field")
    assert unknown.stderr.count("\n") == 1
    small = compared("cluster.ranks_per_node=1", "--gap", 0.3, "-o", tmp_path / "x.html")
    assert "error: with cluster.ranks_per_node=1: actor_train needs 114.5 GiB on a rank" in small.stderr
    assert not (tmp_path / "x.html").exists()
