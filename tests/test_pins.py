"""Pins with hashes are of the versions in constraints.txt, and the bill of materials has every package of them."""

from __future__ import annotations

import configparser
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "requirements"
RUN_EXTRAS = ("run", "data", "sandbox", "tensorboard")


def names(requirements: str) -> set[str]:
    """The packages in a list of requirements."""
    lines = (line for line in requirements.splitlines() if re.match(r"\w", line))
    return {re.split(r"[\s<>=;]", line)[0].lower().replace("_", "-") for line in lines}


def versions(requirements: str) -> dict[str, str]:
    pinned = re.findall(r"^([\w.-]+)==([^ ;\\\n]+)", requirements, flags=re.M)
    return {name.lower().replace("_", "-"): version for name, version in pinned}


def pinned(name: str) -> str:
    return (REQUIREMENTS / name).read_text()


def script(name: str = "sbom") -> Any:
    """A module that a build loads, which is in no package."""
    spec = importlib.util.spec_from_file_location(name, REQUIREMENTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "extras"), [("plan.txt", ()), ("run.txt", RUN_EXTRAS)])
def test_each_requirement_is_pinned_with_hashes_at_the_version_of_the_constraints(
    name: str, extras: tuple[str, ...]
) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    needed = names(setup["options"]["install_requires"]).union(
        *(names(setup["options.extras_require"][extra]) for extra in extras)
    )
    found, constraints = versions(pinned(name)), versions((ROOT / "constraints.txt").read_text())
    assert needed - found.keys() == set()
    assert {one for one in found.keys() & constraints.keys() if found[one] != constraints[one]} == set()
    hashes = script().hashes_in(name)
    assert hashes.keys() == found.keys()
    assert [one for one, of_files in hashes.items() if not of_files] == []


def test_the_pins_without_pandas_lack_it_and_what_only_it_requires() -> None:
    packages = json.loads((REQUIREMENTS / "packages.json").read_text())
    without = pinned("plan_without_pandas.txt")
    assert without == script("make_pins").without_pandas(pinned("plan.txt"), packages)
    assert versions(pinned("plan.txt")).keys() - versions(without).keys() == {"pandas", "python-dateutil", "tzdata"}
    requires = {one["name"]: set(one["requires"]) for one in packages}
    assert {(user, used) for user in versions(without) for used in requires[user] - versions(without).keys()} == {
        ("ortools", "pandas")
    }


def test_the_bill_of_materials_has_every_package_with_its_licence_and_what_it_requires() -> None:
    bill = json.loads(script().bill_of_materials("1.2.3"))
    assert (bill["bomFormat"], bill["specVersion"], bill["metadata"]["component"]["version"]) == (
        "CycloneDX",
        "1.6",
        "1.2.3",
    )
    components = {one["name"]: one for one in bill["components"]}
    assert {name: one["version"] for name, one in components.items()} == versions(pinned("run.txt"))
    required = {name for name, one in components.items() if one["scope"] == "required"}
    assert required == versions(pinned("plan.txt")).keys()
    references = {one["bom-ref"] for one in bill["components"]}
    assert {one["ref"] for one in bill["dependencies"]} == references | {"pkg:pypi/meshwright@1.2.3"}
    assert all(set(one["dependsOn"]) <= references for one in bill["dependencies"])
    assert components["numpy"]["licenses"] == [{"expression": "BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0"}]
    assert components["jinja2"]["licenses"] == [{"license": {"name": "BSD License"}}]
    ortools = next(one for one in bill["dependencies"] if one["ref"].startswith("pkg:pypi/ortools@"))
    assert any(one.startswith("pkg:pypi/pandas@") for one in ortools["dependsOn"])


def test_the_same_pins_give_the_same_bytes() -> None:
    assert script().bill_of_materials("1.2.3") == script().bill_of_materials("1.2.3")
    assert script().bill_of_materials("1.2.3") != script().bill_of_materials("1.2.4")


def test_the_list_of_licences_has_a_row_for_each_package() -> None:
    rows = script().licences().splitlines()
    assert rows[0] == "package,version,licence,needed by"
    assert {row.partition(",")[0] for row in rows[1:]} == versions(pinned("run.txt")).keys()
    assert all(len(row.split(",")) == 4 for row in rows)
