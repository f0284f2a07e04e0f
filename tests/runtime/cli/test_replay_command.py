"""The replay command shows each update, and numbers that JSON cannot hold as text."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest

from meshwright.runtime.cli.replay import _plain, _show
from meshwright.runtime.records.results import BatchReplay, UpdateReplay

FOUND = BatchReplay(
    stage="actor_train",
    step=12,
    weights_of_step=10,
    reasons=("policy_loss of update 1 is nan",),
    updates=(
        UpdateReplay(rows=(0, 1), metrics={"policy_loss": 0.5, "grad_norm": 1.25}, bad_rows=()),
        UpdateReplay(rows=(2, 3), metrics={"policy_loss": math.nan, "grad_norm": math.inf}, bad_rows=(3,)),
    ),
)


def test_every_update_is_shown_with_its_bad_rows(capsys: pytest.CaptureFixture[str]) -> None:
    _show(FOUND)
    assert capsys.readouterr().out.splitlines() == [
        "actor_train of step 12, with the weights after 10 steps",
        "skipped: policy_loss of update 1 is nan",
        "update 0: loss 0.5, gradient norm 1.25; all rows finite",
        "update 1: loss nan, gradient norm inf; not finite alone: rows 3",
    ]


def test_json_holds_what_is_not_finite_as_text() -> None:
    answer = json.loads(json.dumps(_plain(asdict(FOUND)), allow_nan=False))
    assert answer["updates"][1] == {
        "rows": [2, 3],
        "metrics": {"policy_loss": "nan", "grad_norm": "inf"},
        "bad_rows": [3],
    }
