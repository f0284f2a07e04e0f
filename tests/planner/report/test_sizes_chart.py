"""The job on other numbers of ranks."""

from __future__ import annotations

from meshwright.planner.analysis.whatif import whatif
from meshwright.planner.job.whatif_settings import size_settings
from meshwright.planner.report.whatif_pages import sizes
from tests.planner.drawn import model_of
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan
from tests.planner.report.pages import Outline, circles


def test_the_job_on_other_numbers_of_ranks_has_a_point_for_each_and_its_speed_up() -> None:
    facts = small_facts(ranks_per_node=1, batch_size=4, memory_bytes=2**34)
    plan = random_plan(0, facts, model_of(facts))
    found = whatif(plan, size_settings(facts.cluster, [1, 2]), model_of, replan=True)
    page = sizes(found)
    assert circles(page) == 2
    first, second = (answer.metrics.step_seconds for answer in found.answers if answer.metrics)
    assert f"{first / second:.2f}" in Outline(page).text
    assert "--sizes 8,16,32" in sizes(None)


def test_a_size_without_a_plan_has_no_point_and_says_why() -> None:
    facts = small_facts(ranks_per_node=2, batch_size=4, memory_bytes=2**34)
    plan = random_plan(0, facts, model_of(facts))
    found = whatif(plan, size_settings(facts.cluster, [1, 2]), model_of)
    refused = next(answer for answer in found.answers if answer.setting["cluster.ranks_per_node"] == 1)
    assert refused.violations
    page = sizes(found)
    assert circles(page) == 1
    assert refused.violations[0] in " ".join(Outline(page).text)
