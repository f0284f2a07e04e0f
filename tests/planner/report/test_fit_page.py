"""A job on several numbers of devices, as one page."""

from __future__ import annotations

from meshwright.planner.analysis.cluster_sizing import fit
from meshwright.planner.report.whatif_pages import fit_page
from tests.planner.jobs import ToyModel, small_facts


def test_the_page_says_the_least_number_and_draws_a_point_for_each_size() -> None:
    found = fit(small_facts(ranks_per_node=2, batch_size=4, memory_bytes=2**40), ToyModel, sizes=(1, 2))
    assert found.answers is not None
    assert found.min_ranks is not None
    text = fit_page(found.answers, found.min_ranks)
    assert text.startswith("<!doctype html>")
    assert "a plan fits on 1 devices" in text
    assert text.count("<circle") == 2
