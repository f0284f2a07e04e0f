"""The profile command: one sentence for each mistake, nothing written, and tables of imported operators."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.command import Call

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
