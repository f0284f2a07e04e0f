"""What there is before a plan, from Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright import api

MODEL = Path(__file__).parents[3] / "examples/models/llama-2-7b"


def test_a_first_job_is_a_job(tmp_path: Path) -> None:
    text = api.first_job(MODEL, tmp_path, device="a100-80gb", batch_size=8, prompt=16, response=16)
    (tmp_path / "job.yaml").write_text(text)
    assert api.resolve(api.read_job(tmp_path / "job.yaml"), tmp_path).cluster.num_ranks == 8


def test_a_number_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(api.BadInput, match="batch_size"):
        api.first_job(MODEL, tmp_path, device="a100-80gb", batch_size=0, prompt=16, response=16)


def test_what_is_known_has_names_and_sources() -> None:
    found = api.known_hardware()
    assert {"h100-sxm", "ib-ndr-400"} <= {str(one["name"]) for kind in found.values() for one in kind}
