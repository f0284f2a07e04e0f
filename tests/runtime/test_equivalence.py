"""What a job learns does not depend on its plan: experience and losses of many plans are those of one rank."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.planner.job import read_job, resolve
from meshwright.profiles.schedule import Offload, Recompute, Schedule
from meshwright.runtime.train import Run, RunRequest
from tests.runtime.plans_by_hand import Where, plan_by_hand
from tests.runtime.ranks import run_on_ranks
from tests.runtime.small_job import OF_TIME, write_job

pytestmark = pytest.mark.slow

STEPS = 5
TOLERANCE = 1e-4
NUM_RANKS = 4
FIELDS = ("tokens", "behaviour_logprobs", "proximal_logprobs", "ref_logprobs", "values", "scores")


def rows(number: int, **schedule: Any) -> Schedule:
    return Schedule(micro_batch_size=number, **schedule)


PLANS: dict[str, dict[str, Where]] = {
    "one rank": {"other": Where("0:1", schedule=rows(4))},
    "tp2": {"other": Where("0:2", "tp2", rows(2))},
    "pp2": {
        "other": Where("1:1"),
        **dict.fromkeys(("actor_generate", "actor_train", "actor_logprob"), Where("2:2", "pp2")),
    },
    "dp2": {"other": Where("2:2", "dp2", rows(4))},
    "tp2 pp2": {"other": Where("0:4", "tp2,pp2", rows(2))},
    "sequence parallel": {"other": Where("0:2", "tp2,sp", rows(4)), "actor_generate": Where("0:2", "tp2")},
    "every stage of its own": {
        "actor_generate": Where("0:4", "pp2,dp2"),
        "reward_score": Where("0:4", "dp4", rows(2)),
        "ref_logprob": Where("0:4", "tp2,dp2,sp", rows(2)),
        "critic_value": Where("0:4", "tp2,pp2,sp", rows(4)),
        "actor_logprob": Where("0:4", "tp2,pp2", rows(2)),
        "actor_train": Where("0:4", "tp2,dp2", rows(2)),
        "critic_train": Where("0:4", "pp2,dp2", rows(2)),
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
        "reward_score": Where("1:1", schedule=rows(4, chunk_tokens=5)),
        "ref_logprob": Where("2:2", "dp2", rows(4, chunk_tokens=3)),
        "critic_value": Where("2:2", "tp2,sp", rows(8, chunk_tokens=7)),
        "other": Where("2:2", "dp2", rows(4)),
    },
    "streaming from two owners into pipelines": {
        "actor_generate": Where("0:2", "dp2"),
        "reward_score": Where("2:2", "pp2", rows(4, chunk_tokens=4)),
        "ref_logprob": Where("2:2", "tp2", rows(4, chunk_tokens=4)),
        "other": Where("0:2", "tp2", rows(4)),
    },
    "selective recomputation": {
        "other": Where("0:2", "tp2", rows(4)),
        "actor_generate": Where("0:2", "dp2"),
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
        "ref_logprob": Where("0:2", "tp2", rows(4, offload=Offload.WEIGHTS)),
        "actor_train": Where("0:2", "dp2", rows(4, offload=Offload.OPTIMIZER)),
        "critic_train": Where("0:2", "tp2,sp", rows(4, offload=Offload.OPTIMIZER)),
    },
    "offload and streaming": {
        "actor_generate": Where("0:1"),
        "reward_score": Where("1:1", schedule=rows(4, chunk_tokens=5, offload=Offload.WEIGHTS)),
        "ref_logprob": Where("1:1", schedule=rows(4, chunk_tokens=5, offload=Offload.WEIGHTS)),
        "other": Where("0:4", "dp4", rows(2)),
        "actor_train": Where("0:4", "tp2,dp2", rows(2, offload=Offload.OPTIMIZER)),
    },
}

Rows = dict[int, Tensor]
Held = list[dict[str, Rows]]


def follow(asked: RunRequest) -> Held:
    """Per step, what this rank holds of the experience."""
    run = Run(asked)
    run.recorder.open(0)
    held = []
    for turn in run.turns:
        experience = run.turn(turn).experience
        held.append({field: {row: experience.get(field, row) for row in experience.rows(field)} for field in FIELDS})
    run.finish()
    run.recorder.close()
    return held


def follow_all(requests: list[RunRequest]) -> list[Held]:
    return [follow(asked) for asked in requests]


Outcome = tuple[Held, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Of each plan, the experience of all ranks together by step, and the metrics."""
    directory = tmp_path_factory.mktemp("job")
    path = write_job(directory, num_ranks=NUM_RANKS)
    job = read_job(path)
    facts = resolve(job, directory)
    requests = [
        RunRequest(plan=plan_by_hand(facts, where), job=job, directory=directory, out=directory / name, steps=STEPS)
        for name, where in PLANS.items()
    ]
    for asked in requests:
        asked.out.mkdir()
    of_ranks = run_on_ranks(NUM_RANKS, follow_all, requests, timeout=900)
    found = {}
    for index, asked in enumerate(requests):
        steps: Held = [{field: {} for field in FIELDS} for _ in range(STEPS)]
        for held in of_ranks:
            for step, fields in enumerate(held[index]):
                for field, of_rows in fields.items():
                    steps[step][field] |= of_rows
        lines = (asked.out / "metrics.jsonl").read_text().splitlines()
        found[asked.out.name] = steps, [json.loads(line) for line in lines]
    return found


@pytest.mark.parametrize("name", [name for name in PLANS if name != "one rank"])
def test_a_plan_gives_the_experience_and_the_losses_of_one_rank(outcomes: dict[str, Outcome], name: str) -> None:
    (steps, lines), (of_one, lines_of_one) = outcomes[name], outcomes["one rank"]
    for step, alone in zip(steps, of_one, strict=True):
        for field in FIELDS:
            assert sorted(step[field]) == sorted(alone[field]) == list(range(16))
            for row, values in alone[field].items():
                torch.testing.assert_close(step[field][row], values, atol=TOLERANCE, rtol=0)
    assert len(lines) == STEPS
    for line, line_of_one in zip(lines, lines_of_one, strict=True):
        for metric in line_of_one.keys() - OF_TIME:
            assert line[metric] == pytest.approx(line_of_one[metric], abs=TOLERANCE), metric
