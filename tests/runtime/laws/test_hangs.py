"""A rank that hangs is named with what it does, whoever waits for it and wherever that is, and the run ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from meshwright.planner.program import deadlines
from meshwright.profiles.errors import RunFailed
from meshwright.runtime.execution.actions import Actions
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.train import _work_alone
from meshwright.runtime.execution.watchdog import STACKS
from meshwright.runtime.launch.launch import Preparation, launch
from meshwright.runtime.messages.experience import ExperienceTransport
from meshwright.runtime.training.refit import RefitCopy
from tests.runtime.laws.test_ahead import DISJOINT
from tests.runtime.small_job import request, write_job

pytestmark = pytest.mark.slow

ALLOWED = 12.0
BEGAN = "began"
POOLED = ("actor_train.layout=dp2", "critic_train.layout=dp2", "actor_generate.layout=dp2", "reward_score.layout=dp2")


def hang(out: Path) -> None:
    (out / BEGAN).write_text(str(time.time()))
    while True:
        time.sleep(1.0)


def stop(out: Path) -> None:
    time.sleep(0.5)
    (out / BEGAN).write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGSTOP)


def plant(kind: type, name: str, chosen: Callable[..., bool], then: Callable[[], None]) -> None:
    """Has a method do something else where it is called so for the third time."""
    before, calls = getattr(kind, name), 0

    def instead(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += chosen(*arguments)
        if calls == 3:
            then()
        return before(*arguments, **named)

    setattr(kind, name, instead)


def hanging(asked: RunRequest, rank: int, where: str) -> object:
    """A run in which a rank hangs in a stage, or where it sends or takes weights."""
    deadlines._LEAST_SECONDS = deadlines._LEAST_AT_FIRST_SECONDS = ALLOWED
    deadlines._OF_MEASURED = deadlines._OF_PREDICTED = 0.0
    if dist.get_rank() == rank:
        if where == "send":
            plant(ExperienceTransport, "send", lambda *_: True, lambda: hang(asked.out))
        elif where == "refit":
            plant(RefitCopy, "run", lambda *_: True, lambda: hang(asked.out))
        elif where == "stopped":
            plant(Actions, "run", lambda _, stage, __: stage == "critic_train", lambda: stop(asked.out))
        else:
            plant(Actions, "run", lambda _, stage, __: stage == where, lambda: hang(asked.out))
    return _work_alone(asked)


def said(tmp_path: Path, pins: tuple[str, ...], rank: int, where: str) -> tuple[str, float, Path]:
    """The sentence that a run ends with in which a rank hangs, after how many seconds, and its directory."""
    asked = request(write_job(tmp_path, num_ranks=2), tmp_path / "run", *pins, steps=100)
    asked.out.mkdir()
    with pytest.raises(RunFailed) as caught:
        launch(
            hanging,
            *(asked, rank, where),
            num_ranks=2,
            preparation=Preparation("cpu"),
            logs=asked.out,
            preload="meshwright.runtime.execution.train",
        )
    return str(caught.value), time.time() - float((asked.out / BEGAN).read_text()), asked.out


@pytest.mark.parametrize(
    ("pins", "rank", "where", "waits"),
    [
        (POOLED, 1, "critic_train", "rank 0 waits in critic_train of step 2, in "),
        (POOLED, 0, "actor_generate", "rank 1 waits in "),
        (DISJOINT, 0, "reward_score", "rank 1 waits in receive "),
        (DISJOINT, 1, "actor_logprob", "rank 0 waits in "),
        (DISJOINT, 0, "send", "rank 1 waits in receive "),
        (DISJOINT, 0, "refit", ""),
    ],
)
def test_a_rank_that_hangs_is_named_with_its_instruction_and_who_waits_for_it(
    tmp_path: Path, pins: tuple[str, ...], rank: int, where: str, waits: str
) -> None:
    sentence, seconds, out = said(tmp_path, pins, rank, where)
    assert sentence.startswith(f"rank {rank} hangs in {where} ")
    assert "in hang (test_hangs.py:" in sentence
    assert waits in sentence
    assert sentence.endswith(f"in {out / STACKS}: look there, then run again with --resume")
    for number in range(2):
        assert "Thread" in (out / STACKS / f"rank-{number:05d}.txt").read_text()
    assert "in hang" in (out / STACKS / f"rank-{rank:05d}.txt").read_text()
    assert ALLOWED < seconds < ALLOWED + 30


def test_a_rank_that_is_stopped_is_noticed_by_another_ones_deadline(tmp_path: Path) -> None:
    sentence, seconds, _ = said(tmp_path, POOLED, 1, "stopped")
    assert sentence.startswith("rank 1 gives no sign of life since critic_train of step 2 (process ")
    assert "which is stopped" in sentence
    assert "; rank 0 waits in critic_train of step 2, in " in sentence
    assert seconds < ALLOWED + 30
