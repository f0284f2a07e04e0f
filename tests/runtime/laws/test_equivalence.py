"""What a job learns does not depend on its plan: experience and losses of many plans are those of one rank."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from meshwright.planner.job.job import read_job, resolve
from meshwright.planner.plan import layout_and_schedule_rules
from meshwright.profiles.schedule import Offload, Recompute, Schedule
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.run import RankRun
from meshwright.runtime.model.kv_cache import PagedCache
from tests.runtime.plans_by_hand import Where, plan_by_hand
from tests.runtime.ranks import run_on_ranks
from tests.runtime.small_job import OF_TIME, write_job

pytestmark = pytest.mark.check_all

STEPS = 5
TOLERANCE = 1e-4
NUM_RANKS = 4
SAMPLING = {"temperature": 0.8, "top_k": 24, "top_p": 0.9}
"""Filters that leave out some tokens of 32 at every position."""
FIELDS = ("tokens", "behaviour_logprobs", "proximal_logprobs", "ref_logprobs", "values", "scores")


def rows(number: int, **schedule: Any) -> Schedule:
    return Schedule(micro_batch_size=number, **schedule)


def tokens(most: int) -> Schedule:
    """Micro-batches of so many; a sequence has 32 at most."""
    return Schedule(micro_batch_size=0, micro_batch_tokens=most)


PLANS: dict[str, dict[str, Where]] = {
    "one rank": {"other": Where("0:1", schedule=rows(4))},
    "tp2": {"other": Where("0:2", "tp2", rows(8))},
    "pp2": {
        "other": Where("1:1"),
        **dict.fromkeys(("actor_generate", "actor_train", "actor_logprob"), Where("2:2", "pp2")),
    },
    "dp2": {"other": Where("2:2", "dp2", rows(4))},
    "tp2 pp2": {"other": Where("0:4", "tp2,pp2", rows(4))},
    "sequence parallel": {"other": Where("0:2", "tp2,sp", rows(8)), "actor_generate": Where("0:2", "dp2")},
    "every stage of its own": {
        "actor_generate": Where("0:4", "pp2,dp2"),
        "reward_score": Where("0:4", "dp4", rows(2)),
        "ref_logprob": Where("0:4", "tp2,dp2,sp", rows(2)),
        "critic_value": Where("0:4", "tp2,pp2,sp", rows(4)),
        "actor_logprob": Where("0:4", "tp2,pp2", rows(2)),
        "actor_train": Where("0:4", "tp2,dp2", rows(2)),
        "critic_train": Where("0:4", "pp2,dp2", rows(2)),
    },
    "micro-batches by tokens": {
        "other": Where("0:4", "tp2,dp2,sp", tokens(32)),
        "actor_generate": Where("0:4", "dp4"),
        "ref_logprob": Where("0:4", "pp2,dp2", tokens(50)),
        "actor_train": Where("0:4", "pp2,dp2", tokens(64)),
        "critic_train": Where("0:4", "dp4", tokens(33)),
    },
    "four pools": {
        "actor_generate": Where("0:1"),
        "reward_score": Where("1:1", schedule=rows(4)),
        "ref_logprob": Where("1:1", schedule=rows(8)),
        "critic_value": Where("1:1", schedule=rows(8)),
        "actor_logprob": Where("2:1"),
        "actor_train": Where("2:1", schedule=rows(4)),
        "critic_train": Where("3:1", schedule=rows(2)),
    },
    "streaming": {
        "actor_generate": Where("0:1"),
        "reward_score": Where("1:1", schedule=rows(16, chunk_tokens=5)),
        "ref_logprob": Where("2:2", "dp2", rows(8, chunk_tokens=3)),
        "critic_value": Where("2:2", "tp2,sp", rows(16, chunk_tokens=7)),
        "other": Where("2:2", "dp2", rows(4)),
    },
    "streaming from two owners into pipelines": {
        "actor_generate": Where("0:2", "dp2"),
        "reward_score": Where("2:2", "pp2", rows(8, chunk_tokens=8)),
        "ref_logprob": Where("2:2", "tp2", rows(8, chunk_tokens=8)),
        "other": Where("0:2", "dp2", rows(4)),
    },
    "interleaved": {
        "other": Where("0:4", "tp2,dp2", rows(4)),
        "actor_train": Where("0:4", "tp2,pp2,vpp2,sp", rows(2, offload=Offload.OPTIMIZER)),
        "critic_train": Where("2:2", "pp2,vpp2", rows(1)),
    },
    "selective recomputation": {
        "other": Where("0:2", "dp2", rows(4)),
        "actor_train": Where("0:2", "dp2", rows(2, recompute=Recompute.SELECTIVE)),
        "critic_train": Where("2:2", "pp2", rows(2, recompute=Recompute.SELECTIVE)),
    },
    "full recomputation": {
        "other": Where("0:2", "dp2", rows(4)),
        "actor_train": Where("2:2", "pp2", rows(2, recompute=Recompute.FULL)),
        "critic_train": Where("2:2", "tp2,sp", rows(4, recompute=Recompute.FULL)),
    },
    "offload": {
        "other": Where("0:2", "dp2", rows(4)),
        "reward_score": Where("0:2", "dp2", rows(4, offload=Offload.WEIGHTS)),
        "ref_logprob": Where("0:2", "tp2", rows(8, offload=Offload.WEIGHTS)),
        "actor_train": Where("0:2", "dp2", rows(4, offload=Offload.OPTIMIZER)),
        "critic_train": Where("0:2", "tp2,sp", rows(4, offload=Offload.OPTIMIZER)),
    },
    "cut sequences": {
        "other": Where("0:2", "cp2"),
        "actor_generate": Where("0:2", "dp2"),
        "ref_logprob": Where("0:4", "pp2,cp2"),
        "actor_train": Where("0:4", "tp2,cp2,sp"),
        "critic_train": Where("2:2", "cp2", rows(1, recompute=Recompute.FULL, offload=Offload.OPTIMIZER)),
    },
    "offload and streaming": {
        "actor_generate": Where("0:1"),
        "reward_score": Where("1:1", schedule=rows(4, chunk_tokens=5, offload=Offload.WEIGHTS)),
        "ref_logprob": Where("1:1", schedule=rows(4, chunk_tokens=5, offload=Offload.WEIGHTS)),
        "other": Where("0:4", "dp4", rows(2)),
        "actor_train": Where("0:4", "tp2,dp2", rows(2, offload=Offload.OPTIMIZER)),
    },
}

CARRYING = {"two batches in flight": {"batches_in_flight": 2}, "overcommit": {"overcommit": 8}}
"""Generations that keep sequences in flight from turn to turn. What they deliver does not depend on the clock."""


def carrying(generation: dict[str, int], chunk_tokens: int) -> dict[str, Where]:
    """Untrained models score what two replicas generate, in chunks or whole."""
    return {
        "actor_generate": Where("0:2", "dp2", Schedule(generation_slots=8, **generation)),
        "reward_score": Where("2:2", "tp2", rows(16, chunk_tokens=chunk_tokens)),
        "ref_logprob": Where("2:2", "dp2", rows(8, chunk_tokens=chunk_tokens)),
        "other": Where("0:2", "dp2", rows(4)),
    }


Rows = dict[int, Tensor]
Held = list[dict[str, Rows]]


@dataclass(frozen=True)
class Followed:
    """What a rank saw of a run: by step what it held of the experience, the caches alive after the last turn, and the
    threads of its process when it was over."""

    held: Held
    num_caches: int
    num_threads: int


def follow(asked: RunRequest) -> Followed:
    run = RankRun(asked)
    run.recorder.open(0)
    held = []
    for turn in run.periods:
        experience = run.run_period(turn).experience
        held.append({field: {row: experience.get(field, row) for row in experience.rows(field)} for field in FIELDS})
    run.finish()
    gc.collect()
    num_caches = sum(type(found) is PagedCache for found in gc.get_objects())
    run.close()
    del run
    gc.collect()
    return Followed(held, num_caches, psutil.Process().num_threads())


def follow_all(requests: list[RunRequest]) -> list[Followed]:
    return [follow(asked) for asked in requests]


@dataclass(frozen=True)
class Outcome:
    """A run as all ranks saw it together."""

    steps: Held
    lines: list[dict[str, Any]]
    num_caches: int
    num_threads: list[int]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Of each plan, in one launch of the ranks."""
    directory = tmp_path_factory.mktemp("job")
    path = write_job(directory, num_ranks=NUM_RANKS, **SAMPLING)
    job = read_job(path)
    facts = resolve(job, directory)
    with pytest.MonkeyPatch.context() as patch:  # a plan would not cut sequences as short as these
        patch.setattr(layout_and_schedule_rules, "MIN_CONTEXT_TOKENS", 1)
        plans = {name: plan_by_hand(facts, where) for name, where in PLANS.items()}
    stale = facts.model_copy(update={"staleness": 2})
    for name, generation in CARRYING.items():
        plans[name] = plan_by_hand(stale, carrying(generation, 0))
        plans[f"{name}, streaming"] = plan_by_hand(stale, carrying(generation, 8))
    requests = [
        RunRequest(plan=plan, job=job, directory=directory, out=directory / name, steps=STEPS)
        for name, plan in plans.items()
    ]
    for asked in requests:
        asked.out.mkdir()
    of_ranks = run_on_ranks(NUM_RANKS, follow_all, requests, timeout=900)
    found = {}
    for index, asked in enumerate(requests):
        steps: Held = [{field: {} for field in FIELDS} for _ in range(STEPS)]
        for followed in of_ranks:
            for step, fields in enumerate(followed[index].held):
                for field, of_rows in fields.items():
                    steps[step][field] |= of_rows
        lines = (asked.out / "metrics.jsonl").read_text().splitlines()
        found[asked.out.name] = Outcome(
            steps,
            [json.loads(line) for line in lines],
            sum(followed[index].num_caches for followed in of_ranks),
            [followed[index].num_threads for followed in of_ranks],
        )
    return found


@pytest.mark.parametrize("name", [name for name in PLANS if name != "one rank"])
def test_a_plan_gives_the_experience_and_the_losses_of_one_rank(outcomes: dict[str, Outcome], name: str) -> None:
    assert_same(outcomes[name], outcomes["one rank"])


@pytest.mark.parametrize("name", CARRYING)
def test_sequences_that_stay_in_flight_are_scored_in_chunks_as_they_are_whole(
    outcomes: dict[str, Outcome], name: str
) -> None:
    assert_same(outcomes[f"{name}, streaming"], outcomes[name])
    assert max(line["max_staleness"] for line in outcomes[name].lines) >= 1


def test_the_generator_draws_with_the_trainers_weights(outcomes: dict[str, Outcome]) -> None:
    of_plans = [outcomes[name].lines for name in PLANS]
    assert max(line["max_generator_gap"] for lines in of_plans for line in lines) < TOLERANCE
    # What other sequences stay in flight beside a response changes nothing for it.
    lines = [line for name in CARRYING for line in outcomes[name].lines if "max_generator_gap" in line]
    assert 0 < len(lines) < len(CARRYING) * STEPS
    assert max(line["max_generator_gap"] for line in lines) < TOLERANCE


def test_no_keys_and_values_are_kept_when_nothing_is_in_flight(outcomes: dict[str, Outcome]) -> None:
    assert {name: outcome.num_caches for name, outcome in outcomes.items()} == dict.fromkeys(outcomes, 0)


@pytest.mark.parametrize("name", CARRYING)
def test_a_run_on_ranks_that_had_one_leaves_no_connection_behind(outcomes: dict[str, Outcome], name: str) -> None:
    """Every group of gloo has threads of its own; both runs have the same layouts, whose groups are shared."""
    assert outcomes[f"{name}, streaming"].num_threads == outcomes[name].num_threads


def test_a_fresh_token_weighs_one_whatever_filters_it_was_drawn_through(outcomes: dict[str, Outcome]) -> None:
    for name in CARRYING:
        first, *later = outcomes[name].lines
        assert first["max_staleness"] == 0
        assert first["importance_weight"] == pytest.approx(1, abs=TOLERANCE)
        assert any(abs(line["importance_weight"] - 1) > TOLERANCE for line in later)


def assert_same(one: Outcome, other: Outcome) -> None:
    for held, also_held in zip(one.steps, other.steps, strict=True):
        for field in FIELDS:
            assert sorted(held[field]) == sorted(also_held[field]) == list(range(16))
            for row, values in held[field].items():
                torch.testing.assert_close(also_held[field][row], values, atol=TOLERANCE, rtol=0)
    assert len(one.lines) == STEPS
    for line, also_line in zip(one.lines, other.lines, strict=True):
        assert line.keys() == also_line.keys()
        for metric in line.keys() - OF_TIME:
            assert also_line[metric] == pytest.approx(line[metric], abs=TOLERANCE), metric
