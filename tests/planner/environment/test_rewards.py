"""A reward is a function or a judge, and planning needs only how it keeps its workers busy."""

from __future__ import annotations

import json

import pytest

from meshwright.planner.job.rewards_and_tools import BUILT_IN, Reward, require_unique_names
from meshwright.profiles.documents import parse
from meshwright.profiles.errors import BadInput


@pytest.mark.parametrize("function", [*BUILT_IN, "mine:score", "mine.inner:score"])
def test_a_function_is_built_in_or_of_a_module(function: str) -> None:
    assert not Reward(name="one", function=function).load.is_remote


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "give one of: function, or url"),
        ({"function": "exact_match", "url": "http://localhost"}, "give one of: function, or url"),
        ({"function": "score"}, "nor of the form module:function"),
        ({"function": "os.system:a b"}, "nor of the form module:function"),
        ({"url": "file:///etc/passwd"}, "url"),
        ({"function": "exact_match", "workers": 0}, "workers"),
    ],
)
def test_what_is_neither_is_refused(given: dict[str, object], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        parse(Reward, json.dumps({"name": "one", **given}), "reward")


def test_a_judge_needs_no_processor_of_the_host() -> None:
    assert Reward(name="judge", url="http://localhost:1/score").load.is_remote


def test_a_name_that_two_rewards_have_is_refused() -> None:
    one = Reward(name="one", function="exact_match")
    require_unique_names([one])
    with pytest.raises(ValueError, match="the name one is given 2 times"):
        require_unique_names([one, one])
