"""Resolves the pins with hashes and the facts about every package, by the tools that `make pins` installs.

`plan.txt` has what planning takes, `run.txt` what running takes with every extra of a run, both for Linux and all
supported versions of Python, at the versions in `constraints.txt`. `packages.json` has the licence of each package and
what it requires. `plan_without_pandas.txt` is `plan.txt` without pandas, which OR-Tools requires and only its own
Python interface imports, and without what only pandas requires.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
RUN_EXTRAS = ("run", "data", "sandbox", "tensorboard")
_HEADER = "# Made by `make pins`. pip install --require-hashes -r requirements/{name}\n"
_SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}
"""SPDX identifiers of names that metadata has in the place of an expression."""


def main() -> None:
    for name, extras in (("plan.txt", ()), ("run.txt", RUN_EXTRAS)):
        (FOLDER / name).write_text(_HEADER.format(name=name) + resolved(extras))
    planning = names((FOLDER / "plan.txt").read_text())
    described = metadata((FOLDER / "run.txt").read_text())
    packages = [
        {
            "name": name,
            "version": one["version"].partition("+")[0],
            "licence": licence(one),
            "requires": sorted(required(one) & described.keys()),
            "plans": name in planning,
        }
        for name, one in sorted(described.items())
    ]
    (FOLDER / "packages.json").write_text(json.dumps(packages, indent=1) + "\n")
    (FOLDER / "plan_without_pandas.txt").write_text(without_pandas((FOLDER / "plan.txt").read_text(), packages))


def without_pandas(requirements: str, packages: list[dict[str, Any]]) -> str:
    """These requirements without pandas and without each package that no other one requires, for an installation
    without dependencies."""
    dropped: set[str] = set()
    requires = {one["name"]: set(one["requires"]) for one in packages if one["plans"]}
    unneeded = {"pandas"}
    while unneeded:
        dropped |= unneeded
        needed = {name for user, used in requires.items() if user not in dropped for name in used}
        unneeded = {name for gone in dropped for name in requires[gone]} - needed - dropped
    _, *entries = re.split(r"^(?=[\w.-]+==)", requirements, flags=re.M)
    kept = "".join(entry for entry in entries if not names(entry) & dropped)
    header = _HEADER.format(name="plan_without_pandas.txt").replace("-hashes", "-hashes --no-deps")
    return header + kept


def resolved(extras: tuple[str, ...]) -> str:
    """The requirements of the package with the hashes of all their files."""
    command = ["uv", "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--no-annotate", "--no-header"]
    command += ["--python-version", "3.11", "--constraint", "constraints.txt", "setup.cfg"]
    for extra in extras:
        command += ["--extra", extra]
    programs = Path(sys.executable).parent
    return subprocess.run(
        [programs / command[0], *command[1:]], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def names(requirements: str) -> set[str]:
    return {normalised(name) for name in re.findall(r"^([\w.-]+)==", requirements, flags=re.M)}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def metadata(requirements: str) -> dict[str, Any]:
    """The metadata of each package of these requirements, by name. pip reads it from the index."""
    with tempfile.TemporaryDirectory() as scratch:
        plain, report = Path(scratch, "plain.txt"), Path(scratch, "report.json")
        plain.write_text("\n".join(re.findall(r"^[\w.-]+==[^ \\]+", requirements, flags=re.M)))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
        subprocess.run([*command, "--report", report, "-r", plain], check=True)
        found = json.loads(report.read_text())["install"]
    return {normalised(one["metadata"]["name"]): one["metadata"] for one in found}


def licence(described: dict[str, Any]) -> str:
    """The SPDX expression of a package, or the name of its licence where it gives no expression."""
    if expression := described.get("license_expression"):
        return str(expression)
    classified = [one.rpartition(" :: ")[2] for one in described.get("classifier", ()) if one.startswith("License")]
    first_line = (described.get("license") or "").strip().partition("\n")[0]
    name = first_line or " and ".join(classified) or "not stated"
    return _SPDX.get(name, next((_SPDX[one] for one in classified if one in _SPDX), name))


def required(described: dict[str, Any]) -> set[str]:
    """The packages that one requires without an extra."""
    lines = [line for line in described.get("requires_dist", ()) if "extra ==" not in line]
    return {normalised(found[0]) for line in lines if (found := re.match(r"[\w.-]+", line))}


if __name__ == "__main__":
    main()
