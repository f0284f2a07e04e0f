"""A tool is a function of a module, or a built-in one."""

from __future__ import annotations

import pytest

from meshwright.planner.job.rewards_and_tools import BUILT_IN_TOOLS, Tool
from meshwright.profiles.documents import parse
from meshwright.profiles.errors import BadInput


@pytest.mark.parametrize("function", [*BUILT_IN_TOOLS, "mine:search"])
def test_a_function_is_built_in_or_of_a_module(function: str) -> None:
    assert Tool(function=function).call_end == ">>"


@pytest.mark.parametrize("given", ['{"function": "search"}', '{"function": "calculator", "call_end": ""}', "{}"])
def test_what_names_no_function_or_no_end_of_a_call_is_refused(given: str) -> None:
    with pytest.raises(BadInput):
        parse(Tool, given, "tool")
