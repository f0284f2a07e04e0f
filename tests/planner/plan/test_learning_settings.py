"""The settings that every algorithm has."""

from __future__ import annotations

import pytest

from meshwright.planner.job.algorithm_settings import LearningRateSchedule, LearningSettings
from meshwright.profiles.documents import parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import Role


def test_a_learning_rate_rises_over_the_warm_up_and_then_falls_to_its_least() -> None:
    falls = LearningRateSchedule(warmup_steps=2, decay="linear", decay_steps=6, min_ratio=0.2)
    assert [falls.ratio(n) for n in range(8)] == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert [LearningRateSchedule(warmup_steps=2).ratio(n) for n in range(4)] == [0.5, 1, 1, 1]
    assert LearningSettings(actor_learning_rate=2.0, actor_schedule=falls).learning_rate(Role.ACTOR, 0) == 1.0


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ('{"top_k": -1}', "top_k is -1: input should be greater than or equal to 0"),
        ('{"top_p": 0}', "top_p is 0: input should be greater than 0"),
        ('{"top_p": 1.5}', "top_p is 1.5: input should be less than or equal to 1"),
        ('{"temperature": 0}', "temperature is 0: input should be greater than 0"),
        ('{"stop": [""]}', "stop.0 is '': string should have at least 1 character"),
    ],
)
def test_a_setting_out_of_range_gets_a_sentence(setting: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        parse(LearningSettings, setting, "job")


def test_by_default_every_token_may_be_drawn_and_no_text_stops() -> None:
    assert (LearningSettings().top_k, LearningSettings().top_p, LearningSettings().stop) == (0, 1.0, ())
