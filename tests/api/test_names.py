"""What `meshwright.api` offers: a sorted list of names, each said what it is, typed, and loaded without torch."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from meshwright import api

FUNCTIONS = [name for name in api.__all__ if inspect.isfunction(getattr(api, name))]


def test_the_list_of_names_is_sorted_and_whole() -> None:
    public = [name for name, value in vars(api).items() if not name.startswith("_") and not inspect.ismodule(value)]
    assert api.__all__ == sorted(public)


@pytest.mark.parametrize("name", api.__all__)
def test_every_name_says_what_it_is(name: str) -> None:
    told = getattr(api, name).__doc__
    assert told is not None
    assert told.split("\n")[0].endswith((".", ":"))
    assert not told.startswith(f"{name}(")  # what dataclasses write where nobody did


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_names_the_types_that_it_takes_and_returns(name: str) -> None:
    signature = inspect.signature(getattr(api, name))
    unknown = [one.name for one in signature.parameters.values() if one.annotation is inspect.Parameter.empty]
    assert unknown == []
    assert signature.return_annotation is not inspect.Signature.empty


@pytest.mark.parametrize("module", ["meshwright.api", "meshwright.runtime.cli.main"])
def test_neither_torch_nor_a_solver_is_loaded_before_a_function_needs_it(module: str) -> None:
    script = f"import sys, {module}; print(sorted({{'torch', 'megatron', 'ortools'}} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
