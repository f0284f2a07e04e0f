"""Loads the functions that a job's rewards and its tool name: built-in ones, and those of modules that the user allows.

A worker process imports this module first, so it imports little itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.profiles.function_paths import load_path
from meshwright.runtime.environment.samples import RewardFunction, ToolFunction

_PACKAGE = "meshwright.runtime.environment"
BUILT_IN_PATHS: Mapping[str, str] = {
    "exact_match": f"{_PACKAGE}.answers:exact_match",
    "maths_answer": f"{_PACKAGE}.answers:maths_answer",
    "unit_tests": f"{_PACKAGE}.unit_tests:unit_tests",
    "calculator": f"{_PACKAGE}.calculator:calculator",
}


def load_function(name: str) -> RewardFunction | ToolFunction:
    """Import and return a built-in function or one named as module:function. Raises BadInput if it cannot be loaded."""
    loaded: RewardFunction | ToolFunction = load_path(BUILT_IN_PATHS.get(name, name), name)
    return loaded
