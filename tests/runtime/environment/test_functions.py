"""A function is found by its name."""

from __future__ import annotations

import pytest

from meshwright.planner.job.rewards_and_tools import BUILT_IN, BUILT_IN_TOOLS
from meshwright.profiles.errors import BadInput
from meshwright.runtime.environment.functions import BUILT_IN_PATHS, load_function
from tests.runtime.environment.samples import MODULE, length, sample


def test_every_built_in_function_is_there() -> None:
    assert tuple(BUILT_IN_PATHS) == (*BUILT_IN, *BUILT_IN_TOOLS)
    for name in BUILT_IN:
        assert load_function(name)([sample("1", "1")]) in ([0.0], [1.0])


def test_a_function_of_a_module_is_found() -> None:
    assert load_function(f"{MODULE}:length") is length


@pytest.mark.parametrize("name", ["no_such_module:score", f"{MODULE}:no_such_function"])
def test_one_that_is_not_there_is_told(name: str) -> None:
    with pytest.raises(BadInput, match="cannot be loaded"):
        load_function(name)
