"""An environment of its own for a rival: the releases of a list, and nothing of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from meshwright.profiles.errors import BadInput

REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def pins(text: str) -> dict[str, str]:
    """Releases by package."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return dict(line.split("==") for line in lines if line)


def python_of(directory: Path) -> Path:
    """The interpreter of the environment in `directory`, which is made where it is not there as the list says.

    Raises BadInput where a package cannot be had.
    """
    python, made = directory / "bin" / "python", directory / REQUIREMENTS.name
    if made.is_file() and made.read_text(encoding="utf-8") == REQUIREMENTS.read_text(encoding="utf-8"):
        return python
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    command = [python, "-m", "pip", "install", "--quiet", "--requirement", REQUIREMENTS]
    if subprocess.run(command, check=False, env=_clean()).returncode:
        raise BadInput(f"pip could not install {REQUIREMENTS}; it needs an index that has these releases.")
    made.write_text(REQUIREMENTS.read_text(encoding="utf-8"), encoding="utf-8")
    return python


def run_in(python: Path, *arguments: object, **variables: str) -> None:
    """Runs it without our paths; raises CalledProcessError with what it said where it fails."""
    command = [str(python), *map(str, arguments)]
    done = subprocess.run(
        command, env=_clean() | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        done.check_returncode()


def _clean() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}}
