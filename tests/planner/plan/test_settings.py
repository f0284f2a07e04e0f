"""PPO settings of sampling and stopping: what is refused, and in which words."""

import pytest

from meshwright.planner.plan.ppo_settings import PPO
from meshwright.profiles.documents import parse
from meshwright.profiles.errors import BadInput


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
        parse(PPO, setting, "job")


def test_by_default_every_token_may_be_drawn_and_no_text_stops() -> None:
    assert (PPO().top_k, PPO().top_p, PPO().stop) == (0, 1.0, ())
