"""What the project is held against is given nothing by the project."""

from __future__ import annotations

import ast

import pytest

from tests.house.modules import ROOT

REFERENCES = sorted((ROOT / "tests/reference").glob("*.py"))
OTHERS = {f"tests.reference.{path.stem}" for path in REFERENCES}


@pytest.mark.parametrize("name", [path.name for path in REFERENCES])
def test_a_reference_is_given_nothing_by_the_project(name: str) -> None:
    tree = ast.parse((ROOT / "tests/reference" / name).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "torch" in imported
    assert {one for one in imported if one.startswith(("meshwright", "tests"))} <= OTHERS
