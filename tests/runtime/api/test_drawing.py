"""Pages and timelines are drawn of what was traced, and of nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from meshwright import api


def measured(plan: api.Plan) -> api.Run:
    spans = api.simulate(plan, steps=2, traced=True).spans
    return api.Run(spans=tuple(replace(span, clock="measured") for span in spans), name="mine")


def test_a_report_shows_the_plan_its_simulation_and_its_runs(small_plan: api.Plan) -> None:
    page = api.report(small_plan, api.simulate(small_plan, steps=2, traced=True), runs=[measured(small_plan)])
    assert page.startswith("<!doctype html>")
    assert "SIMULATED" in page
    assert "MEASURED mine s" in page


def test_a_simulation_that_was_not_traced_is_not_drawn(small_plan: api.Plan) -> None:
    untraced = api.simulate(small_plan, steps=2)
    for draw in (lambda: api.report(small_plan, untraced), lambda: api.timeline(small_plan, untraced)):
        with pytest.raises(api.BadInput, match="simulate with traced=True"):
            draw()


def test_a_plan_that_breaks_a_rule_is_not_drawn(small_plan: api.Plan) -> None:
    simulation = api.simulate(small_plan, steps=2, traced=True)
    with pytest.raises(api.BadInput, match=r"^plan: period_seconds is 1e\+06"):
        api.report(small_plan.model_copy(update={"period_seconds": 1e6}), simulation)


def test_a_timeline_has_a_process_for_each_clock(small_plan: api.Plan) -> None:
    simulation = api.simulate(small_plan, steps=1, traced=True)
    events = json.loads(api.timeline(small_plan, simulation, measured(small_plan)))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["SIMULATED", "measured mine"]


def test_a_plot_needs_a_field_with_several_values(small_plan: api.Plan) -> None:
    assert api.plot(api.whatif(small_plan, [{"workload.response.fixed": n} for n in (32, 64)])).count("<circle") == 4
    with pytest.raises(api.BadInput, match="needs a field with several values"):
        api.plot(api.whatif(small_plan, [{"workload.response.fixed": 32}]))
