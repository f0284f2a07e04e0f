"""What the page shows: differences from the job as given in their own units, and the lengths as they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.plan.plan import Plan, read_plan
from meshwright.planner.report.formatting import seconds
from meshwright.planner.search.search_control import SearchProgress
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.uncertainty import interval
from meshwright.runtime.explorer.searches import Answer, Refusal
from meshwright.runtime.explorer.source import read_source
from meshwright.runtime.explorer.state import State, state_of
from meshwright.runtime.explorer.views import (
    Beside,
    _bars,
    _quantities,
    _rows,
    answer_page,
    grid_page,
    numbers,
    searching,
    share,
)
from tests.planner.report.pages import Outline
from tests.runtime.plans_by_hand import Where, plan_by_hand


@pytest.fixture(scope="module")
def document(plan: Path) -> Plan:
    return read_plan(plan)


def answered(plan: Plan, *, stopped: bool = False) -> Answer:
    return Answer(outcome=plan, seconds=1.0, stopped=stopped, step_interval=interval(plan.period_seconds, [0.1]))


def test_every_quantity_is_compared_in_its_own_unit(document: Plan) -> None:
    peaks = tuple(peak - 2**20 for peak in document.peak_bytes_per_rank)
    changed = document.model_copy(update={"period_seconds": 2 * document.period_seconds, "peak_bytes_per_rank": peaks})
    state = State(price=2.0)
    here, given = (_quantities(state, answered(plan)) for plan in (changed, document))
    rows = {row.name: row.difference for row in _rows(here, given)}
    assert rows["step"] == rows["money of 1,000 steps"] == "+100.0%"
    assert rows["response tokens/s"] == "-50.0%"
    assert rows["free memory on the fullest rank"] in ("+1.0 MiB", "")
    assert rows["GPUs"] == rows["staleness"] == ""


def test_what_is_predicted_has_a_range_and_what_is_known_has_none(document: Plan) -> None:
    state, answer = State(price=2.0, num_steps=10), answered(document)
    rows = {row.name: row.range for row in _rows(_quantities(state, answer), {})}
    of_step = answer.step_interval
    assert of_step is not None
    assert rows["step"] == f"{seconds(of_step.p10)} to {seconds(of_step.p90)}"
    assert all(rows[name] for name in ("response tokens/s", "hours of 10 steps", "money of 10 steps"))
    assert rows["GPUs"] == rows["staleness"] == rows["free memory on the fullest rank"] == ""
    data: Any = numbers(state, answer)
    assert data["ranges"]["step_seconds"] == {"p10": of_step.p10, "p90": of_step.p90}
    share = of_step.p90 / document.period_seconds
    assert data["ranges"]["money"]["p90"] == pytest.approx(data["cost"]["money"] * share)
    assert numbers(state, Answer(outcome=Refusal("no."), seconds=1.0)) is None


def test_two_plans_are_beside_each_other_with_their_reasons(plan: Path, document: Plan) -> None:
    facts = document.facts
    other = plan_by_hand(facts, {"other": Where("0:2", "dp2"), "actor_train": Where("0:2", "tp2")})
    state = state_of([], ("actor_train.layout=tp2",), 2.0)
    source = read_source(plan)
    page = Outline(answer_page(source, state, answered(other), Beside(answered(document), None, ())))
    text = " ".join(page.text)
    assert "compared" in page.ids
    assert f"A step takes {other.period_seconds:.3f} s instead of {document.period_seconds:.3f} s" in text
    assert "actor_train: tp2,pp1,dp1 instead of tp1,pp1,dp2" in text
    assert "-o kept.json meshwright compare kept.json plan.json" in text.replace("\n", " ")
    refused = Answer(outcome=Refusal("it cannot be."), seconds=1.0)
    missing = " ".join(Outline(answer_page(source, state, answered(other), Beside(refused, None, ()))).text)
    assert "“as given” has no plan: it cannot be." in missing
    waits = " ".join(Outline(answer_page(source, state, answered(other), Beside(None, None, ()))).text)
    assert "The plan beside this one is being searched." in waits


def test_a_grid_is_a_table_from_the_cheapest_on_and_two_plots(plan: Path, document: Plan) -> None:
    state = state_of([], (), 2.0, grid=["staleness=0,1,2"])
    twice = document.model_copy(update={"period_seconds": 2 * document.period_seconds})
    answers = [answered(twice), answered(document), Answer(outcome=Refusal("it cannot be."), seconds=1.0)]
    page = Outline(grid_page(read_source(plan), state, answers, is_stopped=False))
    labels = [text for text in page.text if text.startswith("staleness=") and ":" not in text]
    assert labels == ["staleness=1", "staleness=0", "staleness=2"]
    assert page.names.count("circle") == 2 * 2
    assert page.text.count("on the front") == 1
    assert "no plan: it cannot be." in page.text
    assert ("href", f"?{replace(state, grid=state.grid, settings=(('staleness', '1'),)).query}") in page.attributes
    assert any("--grid staleness=0,1,2 -o grid.json" in text for text in page.text)
    waits = Outline(grid_page(read_source(plan), state, [None, answers[1], None], is_stopped=True))
    assert "1 of 3 combinations are planned" in " ".join(waits.text)
    assert "resume" in waits.ids
    assert grid_page(read_source(plan), State(), [], is_stopped=False) == ""


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
    answer = answered(document, stopped=True)
    state = state_of([], ())
    page = answer_page(read_source(plan), state, answer, Beside(None, None, ()))
    assert 'id="again"' in page
    assert "They are being searched." in page
    assert "job.yaml?" not in page
    assert "plan.json?" in page
