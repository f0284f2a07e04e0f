"""What the page shows: differences from the job as given in their own units, and the lengths as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.plan.plan import Plan, read_plan
from meshwright.planner.search.search_control import SearchProgress
from meshwright.profiles.lengths import LengthSpec
from meshwright.runtime.explorer.searches import Answer
from meshwright.runtime.explorer.source import read_source
from meshwright.runtime.explorer.state import State, state_of
from meshwright.runtime.explorer.views import _bars, _rows, answer_page, searching, share


@pytest.fixture(scope="module")
def document(plan: Path) -> Plan:
    return read_plan(plan)


def test_every_quantity_is_compared_in_its_own_unit(document: Plan) -> None:
    peaks = tuple(peak - 2**20 for peak in document.peak_bytes_per_rank)
    changed = document.model_copy(update={"period_seconds": 2 * document.period_seconds, "peak_bytes_per_rank": peaks})
    rows = {row.name: row.difference for row in _rows(changed, State(price=2.0), document)}
    assert rows["step"] == rows["money of 1,000 steps"] == "+100.0%"
    assert rows["response tokens/s"] == "-50.0%"
    assert rows["free memory on the fullest rank"] in ("+1.0 MiB", "")
    assert rows["GPUs"] == rows["staleness"] == ""


def test_the_bars_of_lengths_are_shares_of_the_most_frequent_interval() -> None:
    bars = _bars(LengthSpec(max=64, histogram=((2, 1.0), (64, 3.0))).resolve())
    assert len(bars) == 32
    assert [(bar.x, bar.height) for bar in bars if bar.height] == [(0.0, pytest.approx(100 / 3)), (96.875, 100.0)]
    assert bars[-1].title == "62 to 64 tokens: 75.0%"


def test_the_news_of_a_search_have_what_is_known() -> None:
    assert searching(None, None) == "Searching."
    assert searching(None, 2.0) == "Searching; the given placements would take 2.00 s a step."
    early = SearchProgress(phase="costing", done=1, total=4, period_seconds=None, bound_seconds=0.0)
    late = SearchProgress(phase="searching", done=1, total=2, period_seconds=3.0, bound_seconds=1.5)
    assert searching(early, None) == "Searching: costing stage 2 of 4."
    assert searching(late, 2.0) == ("Searching: searching case 2 of 2; best so far 3.00 s a step, none below 1.50 s.")
    assert (share(None), share(early), share(late)) == (None, 0.125, 0.75)


def test_a_stopped_search_can_be_ended_and_a_plan_cannot_be_saved_as_a_job(plan: Path, document: Plan) -> None:
    answer = Answer(outcome=document, seconds=1.0, stopped=True)
    state = state_of([], ())
    page = answer_page(read_source(plan), state, answer, given=None, layouts=None, reasons=())
    assert 'id="again"' in page
    assert "They are being searched." in page
    assert "job.yaml?" not in page
    assert "plan.json?" in page
