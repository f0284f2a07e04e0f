"""Imported operators: a table of a job or of known models, made once, and offered where it can be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.job.sections import ClusterSpec
from meshwright.profiles.aiconfigurator import PACKAGE, package_version
from meshwright.profiles.errors import BadInput
from meshwright.profiles.table import read_table
from meshwright.runtime.cli.operator_timings import import_table
from meshwright.runtime.cli.plan import operator_timings_hint
from tests.runtime.command import Call

H100_JOB = Path(__file__).parents[3] / "examples" / "70b-64xh100" / "job.yaml"

needs_package = pytest.mark.skipif(package_version() is None, reason=f"{PACKAGE} is not installed")


def test_a_device_that_nobody_measured_is_refused(call: Call, job: Path, tmp_path: Path) -> None:
    outcome = call("profile", job, "--from", "aiconfigurator", "-o", tmp_path / "table.json")
    assert outcome.code == 2
    assert f"{PACKAGE} has no operators of the job's device" in outcome.err


@needs_package
def test_a_job_gets_a_table_of_operators_that_plans_it(call: Call, tmp_path: Path) -> None:
    output = tmp_path / "table.json"
    outcome = call("profile", H100_JOB, "--from", "aiconfigurator", "-o", output)
    assert outcome.code == 0
    assert "training is not timed and stays analytic" in outcome.out
    table = read_table(output)
    assert table.provenance.device == "h100-sxm"
    assert table.measurements
    before = output.read_bytes()
    again = call("profile", H100_JOB, "--from", "aiconfigurator", "-o", output)
    assert again.code == 0
    assert output.read_bytes() == before


@needs_package
def test_a_plan_without_a_table_is_offered_one_where_operators_are_at_hand() -> None:
    assert "operator timings of h100-sxm are installed: `meshwright profile job.yaml" in str(
        operator_timings_hint(ClusterSpec(device="h100-sxm").resolve(), Path("job.yaml"))
    )
    assert operator_timings_hint(ClusterSpec().resolve(), Path("job.yaml")) is None


def test_a_table_of_no_job_needs_a_device_and_one_of_a_job_takes_no_other(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="name a job, or a device with --device"):
        import_table(None, None, tmp_path / "table.json")
    with pytest.raises(BadInput, match="--device 'h200_sxm': the job's cluster has 'h100-sxm'; leave --device out"):
        import_table(H100_JOB, "h200_sxm", tmp_path / "table.json")
    assert list(tmp_path.iterdir()) == []
