"""A rank that hangs is named with what it does, whoever waits for it and wherever that is, and the run ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.survival import hangs
from benchmarks.survival.hangs import ALLOWED_SECONDS, PLANTED, STOPPED, Named, Planted, named
from benchmarks.survival.job import write_models
from meshwright.profiles.algorithms import graph_of
from meshwright.runtime.execution.watchdog import STACKS

IN_TIME = ALLOWED_SECONDS + 30
"""On a machine that others keep busy; the benchmark asks for less."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    write_models(directory)
    return directory


@pytest.mark.check_all
@pytest.mark.parametrize(
    ("planted", "waits"),
    [
        (Planted(where="critic_train", rank=1), "rank 0 waits in critic_train of step 2, in "),
        (Planted(where="actor_generate", rank=0), "rank 1 waits in "),
        (Planted(where="reward_score", rank=0, together=False), "rank 1 waits in receive "),
        (Planted(where="actor_logprob", rank=1, together=False), "rank 0 waits in "),
        (Planted(where="send", rank=0, together=False), "rank 1 waits in receive "),
        (Planted(where="refit", rank=0, together=False), ""),
        (Planted(where="all_reduce", rank=1), "rank 0 waits in "),
    ],
    ids=lambda found: found.where if isinstance(found, Planted) else "",
)
def test_a_rank_that_hangs_is_named_with_its_instruction_and_who_waits_for_it(
    models: Path, tmp_path: Path, planted: Planted, waits: str
) -> None:
    found, out = named(models, tmp_path / "run", planted), tmp_path / "run"
    assert found.is_right, found.sentence
    assert waits in found.sentence
    assert found.sentence.endswith(f"in {out / STACKS}: look there, then run again with --resume")
    for number in range(2):
        assert "Thread" in (out / STACKS / f"rank-{number:05d}.txt").read_text()
    assert "in hang" in (out / STACKS / f"rank-{planted.rank:05d}.txt").read_text()
    assert found.seconds is not None
    assert ALLOWED_SECONDS < found.seconds < IN_TIME


@pytest.mark.check_all
def test_a_rank_that_is_stopped_is_noticed_by_another_ones_deadline(models: Path, tmp_path: Path) -> None:
    found = named(models, tmp_path / "run", Planted(where=f"{STOPPED}critic_train", rank=1))
    assert found.is_right, found.sentence
    assert found.sentence.startswith("rank 1 has given no sign of life since critic_train of step 2 (process ")
    assert "; rank 0 waits in critic_train of step 2, in " in found.sentence
    assert found.seconds is not None
    assert found.seconds < IN_TIME


def test_hangs_are_planted_in_every_stage_of_both_plans_and_each_is_stopped_too() -> None:
    stages = {*graph_of("ppo", has_ref=True, has_reward=True, has_environment=False).by_name}
    for together in (True, False):
        assert stages <= {one.where for one in PLANTED if one.together is together}
    assert {f"{STOPPED}{stage}" for stage in stages} <= {one.where for one in PLANTED}
    assert {"send", "refit", "all_reduce", "barrier", "isend", "irecv"} <= {one.where for one in PLANTED}


def test_a_hang_holds_when_it_is_named_rightly_and_in_time() -> None:
    planted = Planted(where="refit", rank=1)
    right = "rank 1 has been in refit actor for 12 s, at hang (hangs.py:9); an instruction may take 12 s"
    assert Named(planted=planted, sentence=right, seconds=14.0).holds
    assert not Named(planted=planted, sentence=right, seconds=ALLOWED_SECONDS + 6).holds
    assert not Named(planted=planted, sentence=right.replace("rank 1", "rank 0"), seconds=14.0).holds
    assert not Named(planted=planted, sentence="", seconds=None).holds
    assert "1 of 2 named rightly within 5 s." in hangs.report(
        [Named(planted=planted, sentence=text, seconds=14.0) for text in (right, "")]
    )
