"""The survival benchmark: its pairs of plans cover what it says, and a run that lost too much does not hold."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks.survival import asynchrony, asynchrony_cost, kills, logs, matrix, nodes, saves
from benchmarks.survival.asynchrony import LAYOUTS, Learned, Repeated
from benchmarks.survival.asynchrony_cost import SamenessCost
from benchmarks.survival.job import planned, request_of, write_job, write_models
from benchmarks.survival.kills import CASES, INTERVAL, Survived
from benchmarks.survival.logs import LongLog, Reader, Reading
from benchmarks.survival.matrix import PLANS, TOLERANCE, Pair
from benchmarks.survival.nodes import LostNode
from benchmarks.survival.saves import HOWS, Cost
from meshwright.planner.plan.verify import verify
from meshwright.profiles.run_logs import log_files
from meshwright.profiles.trace import read_spans
from meshwright.runtime.records.run_lines import read_lines
from tests.planner.plans import random_plan
from tests.runtime.records.written_run import write_run


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    write_models(directory, has_experts=True)
    return directory


@pytest.mark.check_all
def test_the_eight_plans_differ_in_ranks_pools_layouts_and_steps_ahead(models: Path) -> None:
    plans = [request_of(models, case, models / "run", 1).plan for case in PLANS]
    assert all(verify(plan) == () for plan in plans)
    layouts = {str(plan.placement("actor_train").layout) for plan in plans}
    assert len(plans) == 8
    assert {plan.facts.cluster.num_ranks for plan in plans} == {1, 2, 4}
    assert {"tp1,pp2,dp1,vpp2", "tp2,pp1,dp2,ep2,sp"} < layouts
    assert {plan.staleness for plan in plans} == {0, 1}
    assert any(len(plan.pools) > 1 for plan in plans)
    assert any(plan.placement("critic_train").layout.cp == 2 for plan in plans)


@pytest.mark.check_all
def test_ranks_are_killed_in_a_synchronous_run_and_at_staleness_two(tmp_path: Path) -> None:
    write_models(tmp_path)
    assert [planned(write_job(tmp_path, case), case.pins)[1].staleness for case in CASES] == [0, 2]


def survived(**changes: object) -> Survived:
    known = {"case": "synchronous", "num_kills": 5, "code": 0, "lost": (1, INTERVAL), "is_equal": True}
    return Survived(**{**known, **changes})  # type: ignore[arg-type]


def test_a_run_holds_that_ends_equal_and_loses_no_more_than_an_interval() -> None:
    assert survived().holds
    for change in ({"code": 4}, {"is_equal": False}, {"lost": (INTERVAL + 1,)}):
        assert not survived(**change).holds
    assert "| synchronous | 10 | 2 | 2 | 2 | 4 | 0 | 2 |" in kills.report([survived(), survived()])


def test_a_pair_holds_within_the_tolerance_and_a_run_that_failed_does_not() -> None:
    assert Pair("a", "b", TOLERANCE).holds
    assert not Pair("a", "b", math.inf, "no checkpoint").holds
    pairs = [Pair(one.name, other.name, 1e-7) for one, other in product(PLANS, repeat=2)]
    assert matrix.report(pairs).startswith("64 of 64 pairs within 1e-04.")


@pytest.mark.check_all
@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_asynchronous_plans_are_as_stale_as_they_say_and_one_streams(tmp_path: Path, staleness: int) -> None:
    write_models(tmp_path)
    plans = [request_of(tmp_path, one.case(staleness), tmp_path / "run", 1).plan for one in LAYOUTS]
    assert [plan.staleness for plan in plans] == [staleness] * 4
    assert len({plan.pools for plan in plans}) == 4
    assert [any(p.schedule.chunk_tokens for p in plan.placements) for plan in plans] == [False, False, False, True]


def learned(*weights: float, version: int = 0) -> Learned:
    return Learned(drawn={(0, 0): ((5, 1), (version, version))}, weights={"actor": torch.tensor(weights)}, seconds=())


def test_a_plan_holds_that_learns_the_same_in_every_repeat_and_as_one_rank_does_of_the_same() -> None:
    def repeated(*repeats: Learned) -> Repeated:
        return Repeated(layouts="two pools", staleness=1, repeats=repeats, alone=learned(1.0))

    assert repeated(learned(1.0), learned(1.0)).holds
    assert not repeated(learned(1.0), learned(1.0000001)).holds
    assert not repeated(learned(1.1), learned(1.1)).holds
    assert repeated(learned(1.1, version=1), learned(1.1, version=1)).holds
    assert "| two pools | 1 | 2 | yes | 1e-01 |" in asynchrony.report([repeated(learned(1.1), learned(1.2))])


def test_what_it_costs_to_learn_the_same_is_told_and_may_be_a_tenth() -> None:
    assert SamenessCost(as_sent=1.09, as_come=1.0).holds
    assert not SamenessCost(as_sent=1.11, as_come=1.0).holds
    assert asynchrony_cost.report(SamenessCost(as_sent=1.05, as_come=1.0)).endswith("+5.0% (of 10%).")


def test_a_node_that_is_lost_holds_when_the_run_goes_on_in_time_and_as_planned() -> None:
    found = LostNode(noticed=2.0, planned=26.0, first_step=28.0, lost_steps=1, said=1.0, measured=1.1, fresh=1.0)
    assert found.holds
    assert not replace(found, first_step=61.0).holds
    assert not replace(found, measured=1.2).holds
    assert not replace(found, measured=0.8).holds
    assert "a step takes 1.100 s, where the new plan says 1.000: +10.0% (of 15%)" in nodes.report(found)


def test_what_a_checkpoint_adds_to_a_step_is_told_beside_it() -> None:
    found = [Cost(how, 1.0 + number, 2.0, number * 10**6) for number, how in enumerate(HOWS)]
    assert "| beside training | 3.000 | +2.000 | 2.000 | 2 |" in saves.report(found)


def test_a_trace_is_made_long_by_earlier_steps_and_its_last_ones_stay(tmp_path: Path) -> None:
    write_run(random_plan(0), tmp_path, steps=logs.STEPS)
    trace, segment_bytes = tmp_path / "trace.jsonl", 400_000
    recorded = read_spans(trace)
    num_steps = logs.lengthen(tmp_path, 2_000_000, segment_bytes=segment_bytes)
    spans, files = read_spans(trace), log_files(trace)
    assert spans[-len(recorded) :] == recorded
    steps = [*range(logs.FIRST_STEP, logs.FIRST_STEP + num_steps), *range(logs.STEPS)]
    assert sorted({span.step for span in spans}) == steps
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl", dict)] == steps
    assert len(files) == 5
    assert segment_bytes * 0.8 < files[-1].stat().st_size < segment_bytes


def test_a_reader_holds_that_reads_a_long_trace_in_little_more_memory() -> None:
    def reader(peak_bytes: int, code: int = 0) -> Reader:
        short, long = (Reading(code=code, seconds=1.0, peak_bytes=size) for size in (2**27, peak_bytes))
        return Reader(name="watch", short=short, long=long)

    assert reader(2**27 + logs.MOST_BYTES).holds
    assert not reader(2**27 + logs.MOST_BYTES + 1).holds
    assert not reader(2**27, code=2).holds
    found = LongLog(trace_bytes=2**30, file_bytes=2**26, num_steps=1000, readers=(reader(2**28), reader(2**30)))
    assert not found.holds
    assert "| watch | 1.0 | 128 | 1.0 | 256 | 128 | yes |" in logs.report(found)
