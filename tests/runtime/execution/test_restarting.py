"""A run that fails is started again from where it stands, so often and not more, and what is nobody's fault alone."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.planner.plan.plan import write_plan
from meshwright.profiles.errors import BadInput, RunFailed
from meshwright.runtime.execution import train
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.train import pause_seconds, restart_request, with_restarts
from meshwright.runtime.launch.rendezvous import Rendezvous
from meshwright.runtime.records.restarts import NEXT_PLAN, Restart, Stopped, read_restarts, write_restart
from tests.runtime.execution.test_resume import save
from tests.runtime.small_job import request, write_job


@pytest.fixture
def asked(tmp_path: Path) -> RunRequest:
    out = tmp_path / "run"
    out.mkdir()
    return replace(request(write_job(tmp_path, num_ranks=1), out), max_restarts=2)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "pause_seconds", lambda _: 0.0)


class Failing:
    """A launch that fails some times, each time behind another checkpoint."""

    def __init__(self, times: int) -> None:
        self.times, self.seen = times, list[tuple[RunRequest, Rendezvous]]()

    def __call__(self, asked: RunRequest, rendezvous: Rendezvous) -> str:
        self.seen.append((asked, rendezvous))
        if len(self.seen) > self.times:
            return "done"
        steps = "".join(json.dumps({"step": step}) + "\n" for step in range(len(self.seen) + 1))
        (asked.out / "metrics.jsonl").write_text(steps)
        if len(self.seen) > 1:
            save(asked.out, len(self.seen))
        raise RunFailed(f"failure {len(self.seen)}.")


def test_a_run_goes_on_from_its_last_checkpoint_and_begins_again_without_one(
    asked: RunRequest, at_once: None, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = Failing(2)
    assert with_restarts(launch, asked, Rendezvous()) == "done"
    assert [one.resume for one, _ in launch.seen] == [False, False, True]
    assert [one.restarts for one, _ in launch.seen] == [0, 1, 2]
    assert [place.attempt for _, place in launch.seen] == [0, 1, 2]
    first, second = read_restarts(asked.out)
    assert (first.saved, first.lost, first.reason) == (0, 2, "failure 1")
    assert (second.saved, second.lost, second.reason) == (2, 1, "failure 2")
    said = capsys.readouterr().err
    assert "restart 1 from step 0, 2 steps lost: failure 1; starting again in 0 s (1 of 2)" in said


def test_a_run_that_is_resumed_by_hand_counts_its_restarts_on(asked: RunRequest, at_once: None) -> None:
    for _ in range(2):
        with_restarts(Failing(1), asked, Rendezvous())
    assert [one.number for one in read_restarts(asked.out)] == [1, 2]


def test_one_failure_more_than_may_be_tried_again_is_raised(asked: RunRequest, at_once: None) -> None:
    launch = Failing(3)
    with pytest.raises(RunFailed, match="failure 3"):
        with_restarts(launch, asked, Rendezvous())
    assert len(read_restarts(asked.out)) == 2


class GoingOver(Failing):
    """A launch that fails once, and before and behind that stops to go on under another plan, each time another one."""

    def __call__(self, asked: RunRequest, rendezvous: Rendezvous) -> Stopped | str:
        number = len(self.seen) + 1
        write_plan(asked.out / "plan.json", asked.plan)
        if number not in (1, 3):
            return super().__call__(asked, rendezvous)
        self.seen.append((asked, rendezvous))
        save(asked.out, number)
        write_plan(asked.out / NEXT_PLAN, asked.plan.model_copy(update={"pins": (f"actor_train.tp={number}",)}))
        note = Restart(number=number, host="a", reason="", reached=number, saved=number, replan_note=f"plan {number}")
        write_restart(asked.out, note)
        return Stopped(done=number, saved=number, continues=True)


def test_a_run_that_stops_for_another_plan_goes_on_under_it_at_once_and_has_not_failed(
    asked: RunRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited = list[int]()
    monkeypatch.setattr(train, "pause_seconds", lambda number: waited.append(number) or 0.0)
    launch = GoingOver(2)
    assert with_restarts(launch, replace(asked, max_restarts=1), Rendezvous()) == "done"
    plans = [one.plan.pins for one, _ in launch.seen]
    assert plans == [(), ("actor_train.tp=1",), ("actor_train.tp=1",), ("actor_train.tp=3",)]
    assert [one.resume for one, _ in launch.seen] == [False, True, True, True]
    assert [one.restarts for one, _ in launch.seen] == [place.attempt for _, place in launch.seen] == [0, 1, 2, 3]
    assert waited == [1]
    said = capsys.readouterr().err
    assert "restart 1 from step 1, 0 steps lost: plan 1\n" in said
    assert "starting again in 0 s (1 of 1)" in said


def test_a_run_that_is_asked_to_stop_while_it_looks_for_another_plan_stops(asked: RunRequest) -> None:
    stopped = Stopped(done=3, saved=3)
    assert with_restarts(lambda _request, _rendezvous: stopped, asked, Rendezvous()) is stopped


def test_a_restart_that_a_full_disk_does_not_take_down_is_made_all_the_same(
    asked: RunRequest, at_once: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_out: Path, _restart: Restart) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(train, "write_restart", full)
    assert with_restarts(Failing(1), asked, Rendezvous()) == "done"
    assert "failure 1 (not written down: No space left on device); starting again" in capsys.readouterr().err


def test_what_the_user_has_done_wrong_is_not_tried_again(asked: RunRequest) -> None:
    def launch(_asked: RunRequest, _rendezvous: Rendezvous) -> None:
        raise BadInput("weights are missing.")

    with pytest.raises(BadInput, match="weights are missing"):
        with_restarts(launch, asked, Rendezvous())
    assert read_restarts(asked.out) == ()


def test_a_run_that_is_asked_to_stop_while_it_waits_stops(asked: RunRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "pause_seconds", lambda _: 60.0)
    save(asked.out, 4)

    def ask() -> None:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=ask).start()
    assert with_restarts(Failing(9), asked, Rendezvous()) == Stopped(done=4, saved=4)


def test_each_restart_waits_twice_as_long_as_the_one_before_up_to_a_minute() -> None:
    assert [pause_seconds(number) for number in (1, 2, 3, 7, 50)] == [1.0, 2.0, 4.0, 60.0, 60.0]


def test_a_run_goes_on_under_the_plan_that_it_had_last(asked: RunRequest) -> None:
    assert restart_request(asked, 1).plan is asked.plan
    other = asked.plan.model_copy(update={"pins": ("actor_train.tp=1",)})
    (asked.out / "plan.json").write_text(other.model_dump_json())
    assert restart_request(asked, 1).plan == other
