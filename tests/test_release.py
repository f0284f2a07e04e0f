"""What is released stands alone: a wheel, made of the sdist, plans outside the repository."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import first_plan

ROOT = Path(__file__).parents[1]
PACKAGES = ("cost_models", "planner", "profiles", "runtime")
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, f'build_{sys.argv[1]}')(sys.argv[2])"
_NOT_KEPT = (".git", ".venv", "build", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")

pytestmark = pytest.mark.slow


def run(*command: object, **options: Path) -> str:
    """The output of a program that sees nothing of this one; it succeeds."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, env=environment, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist of the repository, and the wheel that is made of it."""
    directory = tmp_path_factory.mktemp("release")
    source = directory / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_KEPT))
    run(sys.executable, "-c", BUILD, "sdist", directory, cwd=source)
    sdist = next(directory.glob("*.tar.gz"))
    with tarfile.open(sdist) as archive:
        archive.extractall(directory, filter="data")
    run(sys.executable, "-c", BUILD, "wheel", directory, cwd=directory / sdist.name.removesuffix(".tar.gz"))
    return directory


@pytest.fixture(scope="module")
def installed(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an empty environment with the wheel alone and what planning requires, checked by its hashes."""
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", environment)
    pip = (environment / "bin/pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--require-hashes", "--requirement", ROOT / "requirements" / "plan.txt", cwd=environment)
    run(*pip, "--no-deps", next(made.glob("*.whl")), cwd=environment)
    run(environment / "bin/pip", "check")
    return environment / "bin"


def files(package: str) -> Iterator[str]:
    """Modules and data of a package, as a wheel has them."""
    for path in (ROOT / package).rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield f"meshwright/{path.relative_to(ROOT)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_has_every_file_of_a_package(made: Path, package: str) -> None:
    with zipfile.ZipFile(next(made.glob("*.whl"))) as wheel:
        missing = set(files(package)) - set(wheel.namelist())
    assert missing == set()


def test_the_wheel_has_a_bill_of_materials_and_the_licences_of_what_it_requires(made: Path) -> None:
    with zipfile.ZipFile(next(made.glob("*.whl"))) as wheel:
        [bill] = [name for name in wheel.namelist() if name.endswith(".dist-info/sboms/meshwright.cdx.json")]
        [licences] = [name for name in wheel.namelist() if name.endswith(".dist-info/licenses/requirements.csv")]
        materials = json.loads(wheel.read(bill))
        rows = wheel.read(licences).decode().splitlines()[1:]
    assert materials["metadata"]["component"]["purl"].startswith("pkg:pypi/meshwright@")
    assert [one["name"] for one in materials["components"]] == [row.partition(",")[0] for row in rows]


def test_the_sdist_has_no_links_and_no_tests(made: Path) -> None:
    with tarfile.open(next(made.glob("*.tar.gz"))) as archive:
        assert [one.name for one in archive if one.issym() or one.islnk() or "/tests/" in one.name] == []


@pytest.mark.check_all
def test_an_empty_environment_with_the_wheel_plans_explains_explores_and_exports(
    installed: Path, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "examples/models/llama-2-7b", tmp_path / "model")
    program = installed / "meshwright"
    where = run(installed / "python", "-c", "import meshwright.planner.compile as c; print(c.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    assert run(program, "--version", cwd=tmp_path).startswith("meshwright ")
    numbers = ("--device", "h100-sxm", "--batch", 64, "--prompt", 128, "--response", 128)
    run(program, "init", "model", *numbers, cwd=tmp_path)
    run(program, "plan", "job.yaml", "--gap", 0.3, "-o", "plan.json", cwd=tmp_path)
    run(program, "verify", "plan.json", cwd=tmp_path)
    run(program, "explain", "plan.json", cwd=tmp_path)
    run(program, "report", "plan.json", "--steps", 2, cwd=tmp_path)
    run(program, "explore", "job.yaml", "--set", "cluster.nodes=2", "--gap", 0.3, "-o", "other.json", cwd=tmp_path)
    for target in ("verl", "slurm", "torchrun", "k8s", "ray"):
        run(program, "export", "plan.json", "job.yaml", "--to", target, "-o", target, cwd=tmp_path)
    assert (tmp_path / "verl" / "run.sh").exists()
    refused = subprocess.run(
        [program, "run", "plan.json", "job.yaml", "--steps", "1", "--out", "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2
    assert "install them with: pip install 'meshwright[run]'." in refused.stderr


@pytest.mark.check_all
def test_from_the_wheel_to_an_explained_plan_is_a_minute_of_processors(made: Path, tmp_path: Path) -> None:
    """The aim of 200 MB is missed: OR-Tools requires pandas."""
    found = first_plan.measure(next(made.glob("*.whl")), tmp_path)
    assert found.processor_seconds < 60
    assert found.installed_bytes < 225e6


@pytest.mark.check_all
def test_without_pandas_an_explained_plan_takes_less_than_200_megabytes(made: Path, tmp_path: Path) -> None:
    found = first_plan.measure(next(made.glob("*.whl")), tmp_path, without_pandas=True)
    assert found.processor_seconds < 60
    assert found.installed_bytes < 175e6


@pytest.mark.check_all
def test_an_empty_environment_with_the_wheel_serves_the_explorer(installed: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples/models/llama-2-7b", tmp_path / "model")
    run(
        installed / "meshwright",
        "init",
        "model",
        "--device",
        "h100-sxm",
        "--batch",
        64,
        "--prompt",
        128,
        "--response",
        128,
        cwd=tmp_path,
    )
    command = [installed / "meshwright", "explore", "job.yaml", "--gap", "0.3"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdout is not None
        address = next(word for word in process.stdout.readline().split() if word.startswith("http://127.0.0.1:"))
        with urllib.request.urlopen(address, timeout=60) as page:
            assert b"Explore job.yaml" in page.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


OUTSIDE = """
from meshwright import api

def seconds_on(path: str, sizes: tuple[int, ...]) -> float:
    facts = api.resolve(api.read_job(path))
    plan = api.plan(facts, limits=api.Limits(gap=0.2))
    if isinstance(plan, api.NoPlan):
        raise SystemExit(plan.limits[0].sentence)
    api.fit(facts, sizes=sizes, price=2.0)
    degree: str = plan.placement("actor_train").layout.tp
    api.plan(facts, pin=["actor_train.tp=2"])
    return plan.period_seconds
"""


@pytest.mark.check_all
def test_a_type_checker_sees_the_types_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text(OUTSIDE)
    python = ("--python-executable", installed / "python")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", *python, "outside.py"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    errors = [line.partition(": error: ")[2] for line in found.splitlines() if ": error: " in line]
    assert errors == [
        'Incompatible types in assignment (expression has type "int", variable has type "str")  [assignment]',
        'Unexpected keyword argument "pin" for "plan"; did you mean "pins"?  [call-arg]',
    ]


MAX_MEGABYTES = 225
"""Limit on what is installed, byte code excluded: 211 on Python 3.11, of which OR-Tools has 82, numpy 57, and pandas,
which OR-Tools requires and a plan does not import, 44."""
INSTALLED_BYTES = """
import importlib.metadata
print(sum(
    path.locate().stat().st_size
    for distribution in importlib.metadata.distributions()
    if distribution.name not in ("pip", "setuptools")
    for path in distribution.files
    if path.suffix != ".pyc" and path.locate().is_file()
))
"""


@pytest.mark.check_all
def test_planning_takes_little_room_and_no_torch(installed: Path) -> None:
    assert int(run(installed / "python", "-c", INSTALLED_BYTES)) / 1e6 < MAX_MEGABYTES
    assert not list(installed.parent.glob("lib/python*/site-packages/torch"))
