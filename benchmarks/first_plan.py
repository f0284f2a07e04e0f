"""From `pip install` of the wheel in an empty environment to an explained plan: seconds of each step, and megabytes.

    pip wheel --no-deps --wheel-dir build . && python -m benchmarks.first_plan build/meshwright-*.whl

With `--without-pandas`, the packages are those of `requirements/plan_without_pandas.txt`, which pip installs without
looking at what they require. The plan is that of the 7B model of `examples/models` on eight H100, as `meshwright init`
writes its job. The packages that the wheel requires come from pip's index or its cache.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_MODEL = _ROOT / "examples/models/llama-2-7b/config.json"
_WITHOUT_PANDAS = _ROOT / "requirements/plan_without_pandas.txt"
_NUMBERS = ("--device", "h100-sxm", "--batch", "512", "--prompt", "1024", "--response", "2048")


@dataclass(frozen=True, kw_only=True)
class FirstPlan:
    """The seconds of each step, by its name, those of all processors together, and the bytes of what was installed, of
    which pip compiled some."""

    seconds: dict[str, float]
    processor_seconds: float
    installed_bytes: int
    compiled_bytes: int

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_plan", description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, help="the wheel of Meshwright")
    parser.add_argument("--without-pandas", action="store_true", help="install the packages without pandas")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = measure(arguments.wheel.resolve(), Path(directory), without_pandas=arguments.without_pandas)
    for name, seconds in found.seconds.items():
        print(f"{name:8} {seconds:6.1f} s")
    print(f"{'all':8} {found.total_seconds:6.1f} s, of processors {found.processor_seconds:.1f} s")
    print(f"{found.installed_bytes / 1e6:.0f} MB, and {found.compiled_bytes / 1e6:.0f} MB of byte code")


def measure(wheel: Path, directory: Path, *, without_pandas: bool = False) -> FirstPlan:
    """Install a wheel into an empty environment in `directory`, and plan a first job with it."""
    environment = directory / "environment"
    _run(sys.executable, "-m", "venv", environment, cwd=directory)
    program, empty = environment / "bin/meshwright", _sizes(environment)
    pip = (environment / "bin/pip", "install", "--quiet", "--disable-pip-version-check")
    pinned = (*pip, "--require-hashes", "--no-deps", "-r", _WITHOUT_PANDAS)
    steps: dict[str, tuple[object, ...]] = {
        **({"packages": pinned, "wheel": (*pip, "--no-deps", wheel)} if without_pandas else {"install": (*pip, wheel)}),
        "init": (program, "init", _MODEL, *_NUMBERS),
        "plan": (program, "plan", "job.yaml", "-o", "plan.json"),
        "explain": (program, "explain", "plan.json"),
    }
    seconds: dict[str, float] = {}
    processors = _processor_seconds()
    for name, command in steps.items():
        begin = time.perf_counter()
        _run(*command, cwd=directory)
        seconds[name] = time.perf_counter() - begin
    files, compiled = _sizes(environment)
    return FirstPlan(
        seconds=seconds,
        processor_seconds=_processor_seconds() - processors,
        installed_bytes=files - empty[0],
        compiled_bytes=compiled - empty[1],
    )


def _run(*command: object, cwd: Path) -> None:
    """Run a program that sees nothing of this one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    words = [str(word) for word in command]
    subprocess.run(words, cwd=cwd, env=environment, check=True, stdout=subprocess.DEVNULL)


def _processor_seconds() -> float:
    """The seconds that processors worked for all programs that this one started."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _sizes(directory: Path) -> tuple[int, int]:
    """The bytes of all files but byte code, and of byte code."""
    files = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
    compiled = sum(path.stat().st_size for path in files if path.parent.name == "__pycache__")
    return sum(path.stat().st_size for path in files) - compiled, compiled


if __name__ == "__main__":
    main()
