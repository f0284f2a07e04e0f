"""Working ahead: what a run draws and learns follows from its steps ahead alone, whatever the pools and the clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.planner.plan.evaluate import evaluate
from meshwright.planner.plan.steps_ahead import StepsAhead, staleness_of, steps_ahead_patterns, synchronous
from meshwright.planner.plan.verify import verify
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.stages import GENERATE
from meshwright.runtime.execution.request import RunRequest
from tests.runtime.execution.test_train import FIELDS, TOLERANCE, Held, run_steps
from tests.runtime.small_job import OF_TIME, request, write_job
from tests.seeds import cases

pytestmark = pytest.mark.slow

STEPS = 4
DISJOINT = (
    "actor_generate.pool=0:1",
    "actor_train.pool=1:1",
    "actor_logprob.pool=1:1",
    "critic_train.pool=1:1",
    "critic_value.pool=1:1",
    "reward_score.pool=0:1",
    "ref_logprob.pool=1:1",
)

Ran = tuple[list[Held], list[dict[str, Any]]]


def working_ahead(asked: RunRequest, ahead: StepsAhead, bound: int, **generation: int) -> RunRequest:
    """The same run with stages that work ahead, and another schedule of generation, timed again."""
    facts = asked.plan.facts.model_copy(update={"staleness": bound})
    schedule = replace(asked.plan.placement(GENERATE).schedule, **generation)
    placements = tuple(
        p.model_copy(
            update={"steps_ahead": ahead[p.stage], "schedule": schedule if p.stage == GENERATE else p.schedule},
        )
        for p in asked.plan.placements
    )
    used = staleness_of(ahead[GENERATE], schedule, bound)
    moved = evaluate(
        asked.plan.model_copy(update={"facts": facts, "placements": placements, "staleness": used}),
    )
    update = {"status": "pinned", "objective_seconds": moved.period_seconds, "bound_seconds": 0.0, "gap": 1.0}
    moved = moved.model_copy(update={"solver": moved.solver.model_copy(update=update)})
    assert verify(moved) == ()
    return replace(asked, plan=moved, job=asked.job.model_copy(update={"staleness": bound}))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


def on_one_rank(directory: Path, name: str, ahead: StepsAhead, bound: int, **generation: int) -> Ran:
    asked = request(write_job(directory, num_ranks=1), directory / name, steps=STEPS)
    return run_steps(working_ahead(asked, ahead, bound, **generation))


def on_two_ranks(directory: Path, name: str, ahead: StepsAhead, bound: int, **generation: int) -> Ran:
    asked = request(write_job(directory, num_ranks=2), directory / name, *DISJOINT, steps=STEPS)
    return run_steps(working_ahead(asked, ahead, bound, **generation))


def assert_same(one: Ran, other: Ran) -> None:
    for held, also in zip(one[0], other[0], strict=True):
        for field in FIELDS:
            assert sorted(held[field]) == sorted(also[field])
            for row, values in held[field].items():
                torch.testing.assert_close(also[field][row], values, atol=TOLERANCE, rtol=0)
    for line, also_line in zip(one[1], other[1], strict=True):
        for name in line.keys() - OF_TIME:
            assert also_line[name] == pytest.approx(line[name], abs=TOLERANCE), name


@cases(
    ("steps_ahead", "generation", "staleness"),
    [(1, {}, 1), (2, {}, 2), (0, {"batches_in_flight": 2}, 1), (1, {"batches_in_flight": 2, "generation_slots": 8}, 2)],
    ids=["one ahead", "two ahead", "two batches in flight", "one ahead, two batches in flight"],
    few=1,
)
def test_two_pools_at_once_learn_what_one_rank_learns_in_turns(
    directory: Path, tmp_path: Path, steps_ahead: int, generation: dict[str, int], staleness: int
) -> None:
    ahead = steps_ahead_patterns(PPO_GRAPH, 2)[steps_ahead]
    one = on_one_rank(directory, f"{tmp_path.name}-one", ahead, staleness, **generation)
    two = on_two_ranks(directory, f"{tmp_path.name}-two", ahead, staleness, **generation)
    assert_same(one, two)
    stale = [line["max_staleness"] for line in one[1]]
    assert max(stale) == staleness
    assert stale[0] == 0  # nothing has been learned before the first update


def test_an_overcommitted_run_learns_from_every_sequence_once(directory: Path) -> None:
    held, lines = on_two_ranks(
        directory, "overcommit", steps_ahead_patterns(PPO_GRAPH, 1)[1], 3, overcommit=8, generation_slots=16
    )
    assert max(line["max_staleness"] for line in lines) <= 3
    alone, _ = on_one_rank(directory, "in order", steps_ahead_patterns(PPO_GRAPH, 1)[1], 1)
    assert drawn_lines(held) == drawn_lines(alone)


@pytest.mark.check_all
def test_a_cache_that_is_recomputed_is_of_the_version_that_its_tokens_are_stamped_with(directory: Path) -> None:
    gaps = {}
    for how in ("keep", "recompute"):
        asked = request(write_job(directory, num_ranks=1), directory / how, steps=STEPS)
        asked = working_ahead(asked, synchronous(PPO_GRAPH), 1, batches_in_flight=2, generation_slots=8)
        facts = asked.plan.facts.model_copy(update={"cache_after_refit": how})
        _, lines = run_steps(replace(asked, plan=asked.plan.model_copy(update={"facts": facts})))
        gaps[how] = max(line.get("max_cache_gap", 0.0) for line in lines)
    assert 0 < gaps["recompute"] < 1e-5
    assert gaps["keep"] > 1e-4


def drawn_lines(held: list[Held]) -> list[tuple[int, ...]]:
    """The first tokens of every sequence of a run, which the prompt has: sorted, so that order does not matter."""
    return sorted(tuple(values[:3].tolist()) for step in held for values in step["tokens"].values())
