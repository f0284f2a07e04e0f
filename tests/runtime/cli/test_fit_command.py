"""The fit command: a table, the same as data, and a picture."""

from __future__ import annotations

import json
from pathlib import Path

from tests.runtime.command import Call
from tests.runtime.small_job import TINY, edited_job


def test_several_sizes_are_told_and_drawn(call: Call, job: Path, tmp_path: Path) -> None:
    plot = tmp_path / "fit.html"
    outcome = call("fit", job, "--sizes", "1,2", "--gap", 0.3, "--price", 2, "--plot", plot, "--json")
    assert outcome.code == 0
    found = json.loads(outcome.out)
    assert found["min_ranks"] == 1
    assert [point["num_ranks"] for point in found["points"]] == [1, 2]
    assert plot.read_text().count("<circle") == 2


def test_the_least_number_comes_first(call: Call, job: Path) -> None:
    told = call("fit", job, "--sizes", "2", "--gap", 0.5).out
    assert told.startswith("a plan fits on 1 devices")


def test_a_job_that_fits_nowhere_ends_with_the_code_of_no_plan(call: Call, job: Path) -> None:
    small = edited_job(job, "cluster", device=TINY)
    outcome = call("fit", small)
    assert outcome.code == 3
    assert "no plan fits" in outcome.err
