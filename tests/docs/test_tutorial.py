"""Every command of the tutorial does what it says, in the order in which a reader gives them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.named import PAGES, ROOT

TUTORIAL = ROOT / "docs" / "tutorial.md"
_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.M | re.S)
_MAKE = "python examples/tiny/make.py --out tiny/build"


def blocks(page: Path) -> list[str]:
    """What a reader gives a shell; other blocks are drawings, patterns and answers."""
    return _BLOCK.findall(page.read_text())


def test_the_tutorial_is_where_such_commands_are() -> None:
    assert [page.name for page in PAGES if blocks(page)] == [TUTORIAL.name]
    assert sum(_MAKE in block for block in blocks(TUTORIAL)) == 1


@pytest.mark.check_all
def test_every_command_does_its_work(tmp_path: Path) -> None:
    """The tiny models are made without learning anything, which takes as many minutes less."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for block in blocks(TUTORIAL):
        script = block.replace(_MAKE, f"{_MAKE} --quick")
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, f"{script}\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"
    left = (
        "tiny/run/summary.json",
        "tiny/report.html",
        "tiny/trained/actor",
        "big/slurm/run.sbatch",
        "big/verl/run.sh",
    )
    assert [name for name in left if not (tmp_path / name).exists()] == []
