"""A run goes over to another plan when that is earned, with a checkpoint whose seconds are known, and else goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.planner.analysis.replan import Replanned
from meshwright.planner.job.job import read_job, resolve
from meshwright.planner.plan.plan import read_plan, write_plan
from meshwright.planner.plan.verify import verify
from meshwright.runtime.execution.consensus import RankRequest
from meshwright.runtime.execution.replanning import NextPlan
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.records.restarts import NEXT_PLAN, read_restarts
from tests.planner.analysis.test_shown import write_steps
from tests.runtime.plans_by_hand import Where, plan_by_hand
from tests.runtime.small_job import write_job
from tests.seeds import cases

EVERY = 4


def on_one_of_two_ranks(directory: Path, steps: int) -> RunRequest:
    """A run whose plan leaves a rank without work, so that there is a better one."""
    path = write_job(directory, num_ranks=2)
    job = read_job(path)
    plan, out = plan_by_hand(resolve(job, directory), {"other": Where("0:1")}), directory / "run"
    out.mkdir()
    write_plan(out / "plan.json", plan)
    return RunRequest(
        plan=plan, job=job, directory=directory, out=out, steps=steps, replan_every=EVERY, launch_time=time.monotonic()
    )


@contextmanager
def looking(request: RunRequest) -> Iterator[NextPlan]:
    """Behind the step at which it looks, until it has found what there is to find."""
    found = NextPlan(request, 0)
    write_steps(request.plan, request.out / "trace.jsonl", range(EVERY))
    for done in range(1, EVERY + 1):
        assert found.request(done, None) == RankRequest()
    try:
        look = found._search
        assert look is not None
        while not look.has_ended:
            time.sleep(0.01)
        yield found
    finally:
        found.close()


@pytest.mark.slow
def test_what_a_checkpoint_takes_is_tried_once_and_then_it_is_decided(tmp_path: Path) -> None:
    request = on_one_of_two_ranks(tmp_path, 100_000)
    with looking(request) as found:
        assert found.request(EVERY + 1, None) == RankRequest(save=True)
        assert found.request(EVERY + 2, None) == RankRequest()  # it is on its way
        assert [found.request(EVERY + 3, 0.5), found.request(EVERY + 4, 0.5)] == 2 * [RankRequest(replan=True)]
        found.write(EVERY + 4)
    new = read_plan(request.out / NEXT_PLAN)
    assert verify(new) == ()
    assert new.lengths_are_observed
    assert {rank for pool in new.pools for rank in pool.ranks} == {0, 1}
    [restart] = read_restarts(request.out)
    assert (restart.number, restart.saved, restart.lost, restart.reason) == (1, EVERY + 4, 0, "")
    assert f"predicted to take {new.period_seconds:.3g} s" in restart.message
    assert f"of the {100_000 - EVERY - 3} steps left" in restart.message


@pytest.mark.slow
@cases(("steps", "checkpoint_seconds"), [(EVERY + 2, 0.5), (1000, 1e6)], few=1)
def test_a_plan_that_the_steps_left_do_not_earn_is_not_gone_over_to(
    tmp_path: Path, steps: int, checkpoint_seconds: float
) -> None:
    with looking(on_one_of_two_ranks(tmp_path, steps)) as found:
        assert found.request(EVERY + 1, checkpoint_seconds) == RankRequest()
        assert found.request(EVERY + 2, checkpoint_seconds) == RankRequest()


@pytest.mark.check_all
def test_what_processes_took_to_start_has_to_be_earned_too(tmp_path: Path) -> None:
    request = on_one_of_two_ranks(tmp_path, 1000)
    with looking(replace(request, launch_time=time.monotonic() - 1e6)) as found:
        assert found.request(EVERY + 1, 0.5) == RankRequest()


@pytest.mark.slow
def test_a_plan_that_cannot_go_on_is_left_whatever_that_takes(tmp_path: Path) -> None:
    with looking(on_one_of_two_ranks(tmp_path, 1000)) as found:
        assert found._search is not None
        answer = found._search.answer()
        assert isinstance(answer, Replanned)
        found._candidate = replace(answer, old_plan_seconds=None, reason_not_kept="rank 0 needs 9 GiB.")
        assert found.request(EVERY + 1, 1e6) == RankRequest(replan=True)
        found.write(EVERY + 1)
        [restart] = read_restarts(found._request.out)
        assert restart.message.endswith("and the old plan cannot continue: rank 0 needs 9 GiB.")


@pytest.mark.slow
def test_a_look_that_fails_is_told_and_the_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = on_one_of_two_ranks(tmp_path, 1000)
    with looking(replace(request, plan=request.plan.model_copy(update={"pins": ("ref_logprob.tp=1",)}))) as found:
        assert found.request(EVERY + 1, 0.5) == RankRequest()
    assert (
        f"not planned again after step {EVERY + 1}: {request.out} is a run of another plan" in capsys.readouterr().err
    )


def test_no_look_is_taken_before_a_step_is_whole_behind_the_first(tmp_path: Path) -> None:
    found = NextPlan(replace(on_one_of_two_ranks(tmp_path, 9), replan_every=1), 3)
    assert found.request(4, 0.5) == RankRequest()
    assert found._search is None
    assert found.request(5, 0.5) == RankRequest()
    assert found._search is not None
    found.close()
