"""The bill of materials (CycloneDX 1.6) and the list of licences of the packages that a wheel requires.

Made of `packages.json`, `plan.txt` and `run.txt` when a wheel is built, by the standard library alone.
"""

from __future__ import annotations

import csv
import io
import json
import re
import uuid
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def bill_of_materials(version: str) -> str:
    """The bill of materials of a version of Meshwright, as JSON; equal inputs give equal bytes."""
    packages = json.loads((FOLDER / "packages.json").read_text())
    hashes = {**hashes_in("plan.txt"), **hashes_in("run.txt")}
    own = f"pkg:pypi/meshwright@{version}"
    references = {one["name"]: f"pkg:pypi/{one['name']}@{one['version']}" for one in packages}
    components = [_component(one, references[one["name"]], hashes[one["name"]]) for one in packages]
    dependencies = [
        {"ref": references[one["name"]], "dependsOn": [references[name] for name in one["requires"]]}
        for one in packages
    ]
    contents = {
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": "meshwright",
                "version": version,
                "purl": own,
                "licenses": [{"expression": "Apache-2.0"}],
            }
        },
        "components": components,
        "dependencies": [{"ref": own, "dependsOn": sorted(references.values())}, *dependencies],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(contents, sort_keys=True))
    header = {"bomFormat": "CycloneDX", "specVersion": "1.6", "serialNumber": f"urn:uuid:{serial}", "version": 1}
    return json.dumps({**header, **contents}, indent=1) + "\n"


def licences() -> str:
    """The licence of each required package as CSV."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("package", "version", "licence", "needed by"))
    for one in json.loads((FOLDER / "packages.json").read_text()):
        rows.writerow((one["name"], one["version"], one["licence"], "planning" if one["plans"] else "running"))
    return text.getvalue()


def hashes_in(requirements: str) -> dict[str, list[str]]:
    """The SHA-256 of every file of each package in a list of requirements."""
    pinned = re.split(r"^(?=[\w.-]+==)", (FOLDER / requirements).read_text(), flags=re.M)[1:]
    return {one.partition("==")[0].lower(): re.findall(r"--hash=sha256:([0-9a-f]{64})", one) for one in pinned}


def _component(package: dict[str, Any], reference: str, hashes: list[str]) -> dict[str, Any]:
    """A package; the planner requires some, and a run the others."""
    page = f"https://pypi.org/project/{package['name']}/{package['version']}/"
    files = [{"alg": "SHA-256", "content": content} for content in hashes]
    return {
        "type": "library",
        "bom-ref": reference,
        "name": package["name"],
        "version": package["version"],
        "purl": reference,
        "scope": "required" if package["plans"] else "optional",
        "licenses": [_licence(package["licence"])],
        "externalReferences": [{"type": "distribution", "url": page, "hashes": files}],
    }


def _licence(text: str) -> dict[str, Any]:
    """An SPDX expression, which has no blanks but around its operators; or else a name."""
    words = re.split(r" (?:AND|OR|WITH) ", text.replace("(", "").replace(")", ""))
    is_expression = all(re.fullmatch(r"[\w.+-]+", word) for word in words)
    return {"expression": text} if is_expression else {"license": {"name": text}}
