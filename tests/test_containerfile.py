"""The container image is built of files that exist, at the pinned versions of everything that a run needs."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

from tests.test_pins import names

ROOT = Path(__file__).parents[1]
LINES = (ROOT / "Containerfile").read_text().replace("\\\n", " ").splitlines()
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")


def test_every_copied_file_exists() -> None:
    copied = [word for line in LINES if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert {"src", "profiles", "cost_models", "planner", "runtime"} <= set(copied)


def test_its_python_is_one_that_the_package_supports() -> None:
    [version] = re.findall(r"^FROM \S+/python:3\.(\d+)-slim", "\n".join(LINES), flags=re.M)
    supported = SETUP["metadata"]["classifiers"]
    assert f"Programming Language :: Python :: 3.{version}" in supported


def test_all_that_it_installs_is_pinned_by_hashes() -> None:
    [install] = [line for line in LINES if "pip install" in line]
    assert "pip install --no-cache-dir --require-hashes --requirement requirements/run.txt" in install
    assert "pip install --no-cache-dir --no-deps --no-build-isolation ." in install
    assert "setuptools" in names((ROOT / "requirements" / "run.txt").read_text())  # which builds the package
