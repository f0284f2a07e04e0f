"""The profile command: one sentence for each mistake, nothing written, and tables of imported operators."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.plan.job import ClusterSpec
from meshwright.profiles.aiconfigurator import PACKAGE, package_version
from meshwright.profiles.table import read_table
from meshwright.runtime.commands.import_operators import offer
from tests.runtime.command import Call

EXAMPLES = Path(__file__).parents[3] / "examples"
H100_JOB = EXAMPLES / "70b-64xh100" / "job.yaml"

needs_package = pytest.mark.skipif(package_version() is None, reason=f"{PACKAGE} is not installed")


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


def test_a_device_that_nobody_measured_is_refused(call: Call, job: Path, tmp_path: Path) -> None:
    outcome = call("profile", job, "--from", "aiconfigurator", "-o", tmp_path / "table.json")
    assert outcome.code == 2
    assert f"{PACKAGE} has no operators of the job's device" in outcome.err


@needs_package
def test_a_job_gets_a_table_of_operators_that_plans_it(call: Call, tmp_path: Path) -> None:
    output = tmp_path / "table.json"
    outcome = call("profile", H100_JOB, "--from", "aiconfigurator", "-o", output)
    assert outcome.code == 0
    assert "training is not among them and stays analytic" in outcome.out
    table = read_table(output)
    assert table.provenance.device == "h100-sxm"
    assert table.measurements
    before = output.read_bytes()
    again = call("profile", H100_JOB, "--from", "aiconfigurator", "-o", output)
    assert again.code == 0
    assert output.read_bytes() == before


@needs_package
def test_a_plan_without_a_table_is_offered_one_where_operators_are_at_hand() -> None:
    assert "measured operators of h100-sxm are installed: `meshwright profile job.yaml" in str(
        offer(ClusterSpec(device="h100-sxm").resolve(), Path("job.yaml"))
    )
    assert offer(ClusterSpec().resolve(), Path("job.yaml")) is None
