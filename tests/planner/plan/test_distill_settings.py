"""What a job may say of a distillation."""

from __future__ import annotations

import json

import pytest

from meshwright.planner.job.algorithm_settings import Distill
from meshwright.profiles.documents import parse
from meshwright.profiles.errors import BadInput


def test_shares_add_up_to_one_and_are_alike_without_weights() -> None:
    assert Distill().shares(4) == (0.25,) * 4
    assert Distill(teacher_weights=(3.0, 1.0)).shares(2) == (0.75, 0.25)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"teacher_weights": [1.0, 0.0]}, "teacher_weights.1 is 0.0: input should be greater than 0"),
        ({"reward_scale": 2.0}, "reward_scale"),
        ({"kl_coefficient": 0.1}, "kl_coefficient"),
        ({"missing_end_penalty": 1.0}, "missing_end_penalty"),
    ],
)
def test_what_pays_rewards_or_weighs_nothing_is_refused(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        parse(Distill, json.dumps(given), "job")
