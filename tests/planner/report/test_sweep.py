"""Sweeps: the first range goes across, every other value is a line, and what cannot be drawn is refused."""

from __future__ import annotations

import re

import pytest

from meshwright.planner.analysis.whatif import WhatIf, whatif
from meshwright.planner.job.whatif_settings import parse_settings
from meshwright.planner.report.whatif_pages import sweep
from meshwright.profiles.errors import BadInput
from tests.planner.drawn import model_of
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan
from tests.planner.report.pages import Outline, circles


def answers(*texts: str) -> WhatIf:
    facts = small_facts(nodes=2, ranks_per_node=2, memory_bytes=2**34)
    return whatif(random_plan(4, facts, model_of(facts)), parse_settings(texts), model_of)


def test_a_range_gives_two_plots_with_a_point_for_each_value_and_a_row_in_the_table() -> None:
    page = sweep(answers("workload.response.fixed=32,64,128"))
    assert circles(page) == 2 * 3
    assert Outline(page).names.count("tr") == 1 + 1 + 3
    assert "What if workload.response.fixed changes" in page


def test_a_second_field_gives_a_line_for_each_of_its_values() -> None:
    page = sweep(answers("workload.response.fixed=32,64,128", "workload.batch_size=16,32"))
    text = Outline(page).text
    assert circles(page) == 2 * 3 * 2
    assert page.count('class="series"') == 2 * 2 * 2
    assert {"batch_size=16", "batch_size=32"} <= set(text)


def test_values_without_an_order_are_points_without_lines() -> None:
    page = sweep(answers("cluster.device=a100-80gb,h100-sxm"))
    assert circles(page) == 2 * 2
    assert 'class="series"' not in page


def test_a_value_that_does_not_fit_is_drawn_open_and_says_why() -> None:
    page = sweep(answers("cluster.device.memory_bytes=100000,17179869184"))
    assert page.count('class="point open"') == 2
    assert re.search(r"rank \d needs .* and its device can use", page)


def test_a_value_that_is_illegal_has_no_point_and_says_why() -> None:
    page = sweep(answers("workload.batch_size=7,16"))
    assert circles(page) == 2
    assert "does not divide the 7 sequences" in page


def test_a_plot_of_single_values_is_refused() -> None:
    with pytest.raises(BadInput, match=r"--plot needs a field with several values and cluster\.nodes has one"):
        sweep(answers("cluster.nodes=4"))
