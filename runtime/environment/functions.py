"""The functions that a job's rewards and its tool may name: built-in ones, and those of modules that the user allows.

A worker process imports this and little else.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from meshwright.profiles.errors import BadInput
from meshwright.runtime.environment.samples import RewardFunction, ToolFunction

_HERE = "meshwright.runtime.environment"
BUILT_IN_PATHS: Mapping[str, str] = {
    "exact_match": f"{_HERE}.answers:exact_match",
    "maths_answer": f"{_HERE}.answers:maths_answer",
    "unit_tests": f"{_HERE}.unit_tests:unit_tests",
    "calculator": f"{_HERE}.calculator:calculator",
}


def function_named(name: str) -> RewardFunction | ToolFunction:
    """A built-in function, or module:function, whose module is imported. Raises BadInput where it is not there."""
    module, _, function = BUILT_IN_PATHS.get(name, name).partition(":")
    try:
        found: RewardFunction | ToolFunction = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise BadInput(f"function {name} cannot be loaded: {error}; run where its module can be imported.") from None
    return found
