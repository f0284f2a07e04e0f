"""Replicas that do not divide the batch learn what one rank learns, and deliver every sequence once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.job.job import read_job, resolve
from meshwright.planner.program.durations import Planned
from meshwright.profiles.schedule import Offload, Schedule
from meshwright.runtime.execution.rehearse import rehearse
from meshwright.runtime.execution.request import RunRequest
from tests.planner.jobs import small_facts
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.execution.test_train import run_steps
from tests.runtime.laws.test_ahead import Ran, assert_same, drawn_lines
from tests.runtime.plans_by_hand import Where, plan_by_hand
from tests.runtime.small_job import edited_job, write_job
from tests.runtime.training.test_checkpoint import Run, _merge
from tests.runtime.training.test_refit import _check
from tests.seeds import cases

pytestmark = pytest.mark.slow

STEPS, UNTIL_HELD_BACK = 3, 8
"""A replica of five rows holds its first sequence back in the seventh step."""


def rows(number: int, **schedule: Any) -> Schedule:
    return Schedule(micro_batch_size=number, **schedule)


ONE_RANK = {"other": Where("0:1")}

ON_THREE_RANKS: dict[str, dict[str, Where]] = {
    "three replicas": {"other": Where("0:3", "dp3", rows(2))},
    "three replicas generate": {"other": Where("0:1", schedule=rows(4)), "actor_generate": Where("0:3", "dp3")},
    "three replicas train": {
        "other": Where("0:2", "dp2", rows(4)),
        "actor_train": Where("0:3", "dp3", rows(1, offload=Offload.OPTIMIZER)),
        "critic_train": Where("0:3", "dp3", rows(3)),
    },
}
"""Of 16 rows they have 6, 5 and 5; of a minibatch of 8, 3, 3 and 2: in micro-batches of two, 2, 2 and 1 of them."""

ON_FOUR_RANKS: dict[str, dict[str, Where]] = {
    "pipelines": {"other": Where("0:4", "pp2,dp2", rows(2))},
    "cut layers": {"other": Where("0:4", "tp2,dp2,sp", rows(2)), "actor_generate": Where("0:4", "dp4")},
    "streaming": {
        "actor_generate": Where("0:2", "dp2"),
        "reward_score": Where("2:2", "dp2", rows(8, chunk_tokens=5)),
        "ref_logprob": Where("2:2", "pp2", rows(5, chunk_tokens=3)),
        "other": Where("0:2", "dp2", rows(2)),
    },
}
"""Of 15 rows two replicas have 8 and 7, and four have 4, 4, 4 and 3; of a minibatch of 5 two have 3 and 2."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


def ran(
    directory: Path,
    out: Path,
    where: dict[str, Where],
    num_ranks: int,
    *,
    batch: dict[str, int],
    staleness: int = 0,
    steps: int = STEPS,
) -> Ran:
    """What a few steps hold and tell, of a plan by hand."""
    path = edited_job(write_job(directory, num_ranks=num_ranks), "workload", **batch)
    job = read_job(path).model_copy(update={"staleness": staleness})
    plan = plan_by_hand(resolve(job, directory), where)
    return run_steps(RunRequest(plan=plan, job=job, directory=directory, out=out, steps=steps))


OF_16, OF_15 = {"batch_size": 16, "num_minibatches": 2}, {"batch_size": 15, "num_minibatches": 3}


@pytest.fixture(scope="module")
def alone(directory: Path) -> dict[int, Ran]:
    """One rank, by the size of the batch."""
    return {b["batch_size"]: ran(directory, directory / str(b), ONE_RANK, 1, batch=b) for b in (OF_16, OF_15)}


@cases("name", ON_THREE_RANKS, few=1)
def test_three_replicas_learn_what_one_rank_learns(
    directory: Path, tmp_path: Path, alone: dict[int, Ran], name: str
) -> None:
    found = ran(directory, tmp_path / "run", ON_THREE_RANKS[name], 3, batch=OF_16)
    assert_same(alone[16], found)
    assert all(sorted(step["tokens"]) == list(range(16)) for step in found[0])


@cases("name", ON_FOUR_RANKS, few=1)
def test_an_odd_batch_is_learned_from_as_on_one_rank(
    directory: Path, tmp_path: Path, alone: dict[int, Ran], name: str
) -> None:
    assert_same(alone[15], ran(directory, tmp_path / "run", ON_FOUR_RANKS[name], 4, batch=OF_15))


@pytest.fixture(scope="module")
def in_turns(directory: Path) -> list[tuple[int, ...]]:
    """The prompts of every sequence of a longer run on one rank."""
    held, _ = ran(directory, directory / "long", ONE_RANK, 1, batch=OF_16, steps=UNTIL_HELD_BACK)
    return drawn_lines(held)


@pytest.mark.check_all
@pytest.mark.parametrize("generation", [{"batches_in_flight": 2}, {"overcommit": 6}], ids=str)
def test_sequences_in_flight_on_three_replicas_are_delivered_once(
    directory: Path, tmp_path: Path, in_turns: list[tuple[int, ...]], generation: dict[str, int]
) -> None:
    where = {
        "actor_generate": Where("0:3", "dp3", Schedule(generation_slots=4, **generation)),  # type: ignore[arg-type]
        "other": Where("0:3", "dp3", rows(2)),
    }
    out = tmp_path / "run"
    held, lines = ran(directory, out, where, 3, batch=OF_16, staleness=1, steps=UNTIL_HELD_BACK)
    assert all(sorted(step["tokens"]) == list(range(16)) for step in held)
    assert drawn_lines(held) == in_turns
    assert max(line["max_staleness"] for line in lines) == 1


@pytest.mark.check_all
def test_an_odd_batch_is_rehearsed_in_the_simulated_time() -> None:
    plan = plan_by_hand(small_facts(batch_size=15, memory_bytes=2**50), ON_FOUR_RANKS["streaming"])
    found = rehearse(plan, Planned(plan), steps=2, speed=2 / plan.period_seconds, ranks_per_process=2)
    assert -0.001 < found.error < 0.25
    tokens = {stage: Counter[int]() for stage in ("actor_generate", "reward_score")}
    for span in found.spans:
        if span.instruction in tokens:
            tokens[span.instruction][span.step] += int(span.facts["num_tokens"])
    assert tokens["reward_score"] == tokens["actor_generate"]
    assert set(tokens["actor_generate"].values()) == {15 * plan.facts.workload.max_tokens}


@cases(("source", "target"), [(("dp3", 0), ("tp2", 2)), (("tp2", 0), ("dp3", 1))], few=1)
def test_weights_move_between_three_replicas_and_others(
    tmp_path: Path, source: tuple[str, int], target: tuple[str, int]
) -> None:
    _check(write_checkpoint(tmp_path / "model"), source, target)


@cases(("first", "then"), [("dp3", "dp2"), ("tp2", "dp3")], few=1)
def test_a_trainer_saved_on_three_replicas_goes_on_on_others(tmp_path: Path, first: str, then: str) -> None:
    write_checkpoint(tmp_path / "actor", "Qwen2")
    places, others = ({"actor": (layout, 0)} for layout in (first, then))
    whole = _merge(tmp_path, Run(places=places, num_updates=3))
    start = _merge(tmp_path, Run(places=places, num_updates=1, written=tmp_path / "saved"))
    rest = _merge(tmp_path, Run(places=others, num_updates=2, read=tmp_path / "saved"))
    assert start["actor"] + rest["actor"] == pytest.approx(whole["actor"], rel=1e-4)
