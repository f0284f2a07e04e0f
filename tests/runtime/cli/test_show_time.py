"""Answers about time on a terminal: what is shown is what was found, and every figure says that it was simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.planner.analysis.whatif import Consequence, PlanMetrics, WhatIf
from meshwright.planner.simulation.sampled_durations import Sampled
from meshwright.planner.simulation.simulate import Simulation, simulate
from meshwright.profiles.lengths import LengthSpec
from meshwright.runtime.cli import view_time
from tests.planner.drawn import model_of, plan_of


@pytest.fixture(scope="module")
def stale() -> Simulation:
    """Of a plan whose sequences run on for up to two turns."""
    plans = (plan_of(seed, LengthSpec(max=256, median=40, p99=200), deferral=2) for seed in range(100))
    simulations = (
        simulate(plan, Sampled(plan, model_of, seed=0), steps=4)
        for plan in plans
        if plan.placement("actor_generate").schedule.batches_in_flight > 1
    )
    # With a slot for every row all batches in flight may end in one period.
    return next(simulated for simulated in simulations if len(simulated.staleness) > 1)


def test_a_simulation_shows_the_share_of_the_tokens_of_each_staleness(
    stale: Simulation, capsys: pytest.CaptureFixture[str]
) -> None:
    view_time.print_simulation(stale, None)
    shown = capsys.readouterr().out
    assert len(stale.staleness) > 1
    assert f"SIMULATED staleness: {stale.mean_staleness:.2f} actor updates on average" in " ".join(shown.split())
    lines = [line.split() for line in shown.splitlines()]
    for one in stale.staleness:
        assert [str(one.staleness), f"{one.share:.1%}"] in [line[:2] for line in lines]


def test_the_mean_staleness_weighs_each_number_of_updates_with_its_tokens(stale: Simulation) -> None:
    assert sum(one.share for one in stale.staleness) == pytest.approx(1)
    assert min(one.staleness for one in stale.staleness) < stale.mean_staleness
    assert stale.mean_staleness < max(one.staleness for one in stale.staleness)


def test_a_simulation_shows_what_all_ranks_together_wait_for(
    stale: Simulation, capsys: pytest.CaptureFixture[str]
) -> None:
    view_time.print_simulation(stale, None)
    row = next(line for line in capsys.readouterr().out.splitlines() if "all ranks" in line)
    assert f"{stale.cluster.idle_share:.1%}" in row
    assert f"{stale.cluster.waits[0].share:.1%}" in row


def test_a_simulation_shows_how_much_of_the_cache_is_used_or_that_it_is_not_told(
    stale: Simulation, capsys: pytest.CaptureFixture[str]
) -> None:
    view_time.print_simulation(stale, None)
    shown = capsys.readouterr().out
    (use,) = stale.caches
    assert "SIMULATED use of the planned KV cache" in shown
    row = f"{use.blocks:,} {use.mean_share:.1%} {use.peak_share:.1%}".split()
    assert [use.stage, *row] in [line.split() for line in shown.splitlines()]
    untold = replace(use, mean_share=None, peak_share=None)
    view_time.print_simulation(replace(stale, caches=(untold,)), None)
    shown = capsys.readouterr().out
    assert f"{use.stage}: the cache use of multi-turn rollouts is not simulated" in shown
    assert "%" not in next(line for line in shown.splitlines() if line.startswith(f"{use.stage}:"))


def test_a_what_if_tells_room_in_gibibytes_and_below_it_what_changes(capsys: pytest.CaptureFixture[str]) -> None:
    planned = PlanMetrics(
        step_seconds=2.0,
        tokens_per_second=1000.0,
        idle_share=0.25,
        headroom_bytes=3.0 * 2**30,
        host_bytes=0.0,
        gpu_hours=4.0,
        money=None,
    )
    changed = replace(planned, step_seconds=1.5, headroom_bytes=-1.0 * 2**30)
    answer = Consequence(
        setting={"cluster.nodes": 2},
        fits=False,
        metrics=changed,
        difference=changed.minus(planned),
        violations=("too large.",),
        extrapolated=(),
        notes=(),
    )
    view_time.print_whatif(WhatIf(baseline=planned, replanned=False, answers=(answer,), notes=()), None)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["as", "planned", "2.000", "1000", "25.0%", "3.00", "4.0", "yes"] in rows
    assert ["nodes=2", "1.500", "1000", "25.0%", "-1.00", "4.0", "no"] in rows
    assert ["(-0.500)", "(+0)", "(+0.0%)", "(-4.00)", "(+0.0)"] in rows
