"""The explain command: what binds a plan, what matters to it, and what other sizes would do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runtime.command import Call


def test_an_explanation_has_what_binds_what_matters_and_other_sizes(call: Call, plan: Path) -> None:
    outcome = call("explain", plan, "--sizes", "1,2", "--price", 2.5, "--json")
    assert outcome.code == 0
    found = json.loads(outcome.out)
    assert [point["num_ranks"] for point in found["sizes"]] == [1, 2]
    assert {"compute peak", "batch size"} <= {one["name"] for one in found["sensitivities"]}
    assert found["explanation"]["critical_path"][0]["because"] == "starts the period"
    assert call("explain", plan).code == 0
    assert call("explain", plan, "--sizes", "two").code == 2


@pytest.mark.parametrize(("sizes", "said"), [("-8", "use 1 or more."), ("3", "use 2 or 4.")])
def test_a_size_is_told_one_that_there_is(call: Call, plan: Path, sizes: str, said: str) -> None:
    outcome = call("explain", plan, "--sizes", sizes)
    assert outcome.code == 2
    assert said in outcome.err
