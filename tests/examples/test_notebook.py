"""The example notebook: every cell runs, and documents show themselves as tables."""

from __future__ import annotations

from pathlib import Path

import nbclient
import nbformat
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SHOWN = {"plan": "A step takes", "whatif": "as planned", "sweep": "GPU-hours", "compare": "step s"}
"""Cells whose document is shown as a table, with words of it."""
PRINTED = {
    "job": "algorithm: grpo",
    "why": "1,000 steps take",
    "pins": "tp=8 does not divide the 28 attention heads of qwen2.5-7b; use tp=4.",
    "simulate": "s a step",
}
"""Cells that print, with words of what they print."""


@pytest.mark.check_all
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Jupyter's own packages
def test_every_cell_runs_and_shows_what_its_text_says() -> None:
    notebook = nbformat.read(EXAMPLES / "grpo_7b.ipynb", as_version=4)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code")  # none is older than the code
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    cells = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    tables = {name: outputs[-1].data["text/html"] for name, outputs in cells.items() if "data" in outputs[-1]}
    assert tables.keys() == SHOWN.keys()
    assert [name for name, words in SHOWN.items() if words not in tables[name] or "<table>" not in tables[name]] == []
    printed = {name: "".join(one.text for one in cells[name]) for name in PRINTED}
    assert [name for name, words in PRINTED.items() if words not in printed[name]] == []
    assert cells.keys() == {*SHOWN, *PRINTED}
