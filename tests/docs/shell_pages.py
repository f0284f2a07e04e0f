"""The blocks of a page that a reader gives a shell, run in order, and the answers that the page shows, held to them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.docs.named import ROOT

_BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```", re.M | re.S)
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
_TOLERANCE = 0.1
"""How far a figure of a page may be from what is printed."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """Each block with its kind: `sh` is what a reader gives a shell, `text` is of the answers to it."""
    return _BLOCK.findall(page.read_text())


def run_page(page: Path, directory: Path, replaced: Mapping[str, str]) -> list[str]:
    """Run the blocks of a page, some of whose texts are replaced, and return the shown lines that were not printed.

    A line was printed if the words are and each number is within 10 %. Raises AssertionError for a block that fails.
    """
    (directory / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    answers, unlike = list[str](), list[str]()
    for kind, text in blocks(page):
        if kind == "text":
            unlike += [line for line in text.splitlines() if not any(_alike(line, answer) for answer in answers)]
            continue
        script = text
        for before, after in replaced.items():
            script = script.replace(before, after)
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=directory,
            env={**os.environ, "PATH": path, "COLUMNS": "80"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, f"{script}\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"
        answers = (ran.stdout + ran.stderr).splitlines()
    return unlike


def _alike(shown: str, printed: str) -> bool:
    """True if both lines have the same words, and numbers that differ by little."""
    if _NUMBER.sub("#", shown).split() != _NUMBER.sub("#", printed).split():
        return False
    numbers = zip(_NUMBER.findall(shown), _NUMBER.findall(printed), strict=True)
    values = ((float(one.replace(",", "")), float(other.replace(",", ""))) for one, other in numbers)
    return all(abs(one - other) <= _TOLERANCE * max(abs(one), abs(other)) for one, other in values)
