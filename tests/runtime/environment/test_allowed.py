"""A run loads functions of modules that its user has named, and of no others."""

from __future__ import annotations

import sys

import pytest

from meshwright.planner.job.rewards_and_tools import Reward
from meshwright.profiles.errors import BadInput
from meshwright.runtime.environment.allowed_functions import require_allowed_rewards


def test_a_module_must_be_named_and_is_not_imported_here() -> None:
    mine = [Reward(name="mine", function="this_is_not_there.inner:score")]
    require_allowed_rewards(mine, ["this_is_not_there.inner"])
    for allowed in ((), ("this_is_not_there",), ("this_is_not_there.inner.more",)):
        with pytest.raises(BadInput, match=r"give --allow-module this_is_not_there\.inner if you trust it"):
            require_allowed_rewards(mine, allowed)
    assert "this_is_not_there" not in sys.modules


def test_a_built_in_function_needs_answers_and_a_judge_needs_nothing() -> None:
    exact, judge = Reward(name="exact", function="exact_match"), Reward(name="judge", url="http://localhost/")
    require_allowed_rewards([exact, judge], ())
    require_allowed_rewards([judge], (), without_answers=("data.prompts",))
    with pytest.raises(BadInput, match=r"beside every prompt of data\.prompts and data\.held_out; add it"):
        require_allowed_rewards([judge, exact], (), without_answers=("data.prompts", "data.held_out"))
