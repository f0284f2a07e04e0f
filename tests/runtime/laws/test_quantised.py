"""A run that generates with 8-bit floats says how far they are off, weights what they draw, and goes on bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.train import run_plan
from tests.runtime.execution.test_train import read_lines
from tests.runtime.small_job import OF_TIME, request, write_job
from tests.seeds import cases

pytestmark = pytest.mark.slow

STEPS = 3
PLANS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "another pool, tp2 to pp2": (
        4,
        ("actor_train.layout=tp2,sp", "actor_generate.layout=pp2", "actor_generate.pool=2:2"),
    ),
    "the same ranks": (2, ("actor_train.layout=tp2", "actor_generate.layout=tp2")),
}
"""By name: ranks and pins."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


def asked(directory: Path, name: str, out: str, *, steps: int = STEPS, resume: bool = False) -> RunRequest:
    """A run of the plan of this name, of the small job with 8-bit floats."""
    num_ranks, pins = PLANS[name]
    job = write_job(directory, num_ranks=num_ranks)
    quantised = job.with_name(f"quantised-{job.name}")
    quantised.write_text(yaml.safe_dump({**yaml.safe_load(job.read_text()), "generation_weights": "fp8"}))
    return request(quantised, directory / out, *pins, steps=steps, resume=resume)


def learned(out: Path) -> list[dict[str, float]]:
    return [{key: line[key] for key in line.keys() - OF_TIME} for line in read_lines(out / "metrics.jsonl")]


@cases("name", PLANS, few=1)
def test_the_gap_is_that_of_8_bits_and_every_token_is_weighted_by_its_own(directory: Path, name: str) -> None:
    run = asked(directory, name, name)
    assert "actor_generate" in {refit.target for refit in run.plan.refits}
    run_plan(run)
    for line in learned(run.out):
        assert 1e-4 < line["generator_gap"] < 0.2
        assert line["max_staleness"] == 0
        assert line["importance_weight"] == pytest.approx(1.0, abs=0.1)
        assert line["importance_weight"] != 1.0


@pytest.mark.check_all
def test_a_run_that_was_stopped_goes_on_bit_for_bit(directory: Path) -> None:
    whole = asked(directory, "the same ranks", "whole")
    run_plan(whole)
    run_plan(asked(directory, "the same ranks", "cut", steps=2))
    cut = asked(directory, "the same ranks", "cut", resume=True)
    run_plan(cut)
    assert learned(cut.out) == learned(whole.out)
