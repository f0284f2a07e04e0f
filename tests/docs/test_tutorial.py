"""Every command of the tutorial and of the two stories does what it says, in the order in which a reader gives them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.docs.named import PAGES, ROOT
from tests.docs.shell_pages import blocks, run_page

_MAKE = "python examples/tiny/make.py --out tiny/build"
_STAND_IN = "python examples/tiny/make.py --out stand_in"
_QUICK = {_MAKE: f"{_MAKE} --quick", _STAND_IN: f"{_STAND_IN} --quick"}
"""The tiny models are made without learning anything, which takes as many minutes less."""

FILES: Mapping[str, tuple[str, ...]] = {
    "tutorial.md": (
        "tiny/run/summary.json",
        "tiny/report.html",
        "tiny/trained/actor",
        "big/slurm/run.sbatch",
        "big/verl/run.sh",
    ),
    "my_model_on_a_laptop.md": ("mine/report.html", "mine/trained/actor/tokenizer.json", "mine/slurm/run.sbatch"),
    "grpo_7b_in_verl.md": ("job.yaml", "better.json", "for_verl/run.sh", "for_verl/reward_hook.py"),
}
"""Some files that the blocks of each page leave."""


def test_commands_in_order_are_on_these_pages_alone() -> None:
    assert {page.name for page in PAGES if any(kind == "sh" for kind, _ in blocks(page))} == FILES.keys()


@pytest.mark.check_all
@pytest.mark.parametrize("page", FILES)
def test_every_command_does_its_work_and_prints_what_the_page_shows(page: str, tmp_path: Path) -> None:
    assert run_page(ROOT / "docs" / page, tmp_path, _QUICK) == []
    assert [name for name in FILES[page] if not (tmp_path / name).exists()] == []
