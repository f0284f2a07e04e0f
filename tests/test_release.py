"""What is released stands alone: a wheel, made of the sdist, plans outside the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    """The programs of an environment that has the wheel alone, and the requirements of this one."""
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", environment)
    run(environment / "bin/pip", "install", "--no-index", "--no-deps", next(made.glob("*.whl")), cwd=environment)
    site = next(environment.glob("lib/python*/site-packages"))
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "requirements.pth").write_text("\n".join(others) + "\n")
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


def test_the_sdist_has_no_links_and_no_tests(made: Path) -> None:
    with tarfile.open(next(made.glob("*.tar.gz"))) as archive:
        assert [one.name for one in archive if one.issym() or one.islnk() or "/tests/" in one.name] == []


@pytest.mark.check_all
def test_an_installed_program_plans_verifies_and_exports(installed: Path, tmp_path: Path) -> None:
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
    run(program, "export", "plan.json", "job.yaml", "--to", "verl", "-o", "for-verl", cwd=tmp_path)
    assert (tmp_path / "for-verl" / "run.sh").exists()
