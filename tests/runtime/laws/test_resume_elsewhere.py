"""A run goes on under any other plan of its job: what it learns then is what it would have learned under the first."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from meshwright.planner.plan.steps_ahead import steps_ahead_patterns
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.errors import RunFailed
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.run import RankRun
from meshwright.runtime.execution.train import run_plan
from meshwright.runtime.inference.slots import Prompt
from meshwright.runtime.messages.experience import StepExperience
from meshwright.runtime.rollout.prompts import PromptData, read_data
from tests.runtime.execution.test_train import read_lines
from tests.runtime.laws.test_ahead import DISJOINT, working_ahead
from tests.runtime.ranks import RankError, run_on_ranks
from tests.runtime.rewarded import rewarded, write_rewarded
from tests.runtime.small_job import OF_TIME, request, write_job
from tests.seeds import cases

pytestmark = pytest.mark.slow

STEPS, SAVED = 5, 3
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


def asked(directory: Path, name: str) -> RunRequest:
    """What a plan of this name runs, in a directory of its own."""
    num_ranks, pins, working = PLANS[name]
    found = request(write_job(directory, num_ranks=num_ranks), directory / name, *pins, steps=STEPS)
    if working is None:
        return found
    steps_ahead, bound, generation = working
    return working_ahead(found, steps_ahead_patterns(PPO_GRAPH, 1)[steps_ahead], bound, **generation)


PLANS: dict[str, tuple[int, tuple[str, ...], tuple[int, int, dict[str, int]] | None]] = {
    "one rank": (1, (), None),
    "tp2, pp2": (2, ("actor_train.layout=tp2", "actor_generate.layout=pp2"), None),
    "four ranks": (
        4,
        ("actor_train.layout=tp2,dp2", "actor_generate.layout=dp4", "critic_train.layout=pp2,dp2"),
        None,
    ),
    "one ahead on one rank": (1, (), (1, 1, {})),
    "one ahead on two pools": (2, DISJOINT, (1, 1, {})),
    "two batches in flight": (1, (), (0, 1, {"batches_in_flight": 2, "generation_slots": 8})),
    "overcommit on two pools": (2, DISJOINT, (1, 3, {"overcommit": 8, "generation_slots": 16})),
}
"""By name: ranks, pins and, where generation works ahead, by how many steps, the bound and its schedule."""


@pytest.fixture(scope="module")
def whole(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """The metrics of runs that nothing stops, with a checkpoint behind every step."""
    found = {}
    for name in ("one rank", "one ahead on one rank"):
        run = replace(asked(directory, name), checkpoint_every=1, keep=STEPS)
        run_plan(run)
        found[name] = read_lines(run.out / "metrics.jsonl")
    return found


@cases(
    ("first", "then"),
    [("one rank", "four ranks"), ("one rank", "tp2, pp2"), ("one ahead on one rank", "one ahead on two pools")],
    few=1,
)
def test_another_plan_learns_what_the_first_would_have(
    directory: Path, whole: dict[str, list[dict[str, Any]]], first: str, then: str
) -> None:
    out = directory / f"{first} then {then}"
    shutil.copytree(directory / first, out)
    for checkpoint in (out / "checkpoints").iterdir():
        if checkpoint.name > f"step-{SAVED:06d}":
            shutil.rmtree(checkpoint)
    run_plan(replace(asked(directory, then), out=out, resume=True))
    for line, known in zip(read_lines(out / "metrics.jsonl"), whole[first], strict=True):
        for name in known.keys() - OF_TIME:
            assert line[name] == pytest.approx(known[name], abs=TOLERANCE), name


def trained_on(run: RunRequest, last: int) -> None:
    """Executes a run up to a step, before which it is cut off, and tells the prompts that this rank trained on."""
    rank, told = RankRun(run), []
    rank.recorder.open(rank.steps.start)
    for turn in range(rank.periods.start, last):
        batch = rank.run_period(turn)
        told += [_prompt(batch, row) for row in batch.experience.rows("truncated") if turn in rank.steps]
    if last < STEPS:
        rank.save(last)
        rank.wait_for_checkpoint(last)
    else:
        rank.finish()
    if dist.get_rank() == dist.get_world_size() - 1:  # which trains in every plan here
        (run.out / f"trained-{last}.json").write_text(json.dumps(told))
    dist.barrier()
    raise RunFailed("cut off")


def _prompt(batch: StepExperience, row: int) -> tuple[int, ...]:
    return tuple(batch.experience.get("tokens", row)[: batch.prompt_length(row)].tolist())


def cut_off(run: RunRequest, last: int) -> list[list[int]]:
    with pytest.raises(RankError, match="cut off"):
        run_on_ranks(run.plan.facts.cluster.num_ranks, trained_on, run, last)
    found: list[list[int]] = json.loads((run.out / f"trained-{last}.json").read_text())
    return found


@cases("draw_again", [False, True], ids=["carried over", "drawn again"], few=1)
@cases("then", ["one rank", "one ahead on two pools", "two batches in flight"], few=1)
@cases("first", ["two batches in flight", "overcommit on two pools"], few=1)
def test_every_prompt_is_trained_on_once_whatever_was_under_way(
    directory: Path, tmp_path: Path, first: str, then: str, draw_again: bool
) -> None:
    run = replace(asked(directory, first), out=tmp_path)
    trained = cut_off(run, SAVED)
    other = replace(asked(directory, then), out=tmp_path, resume=True, resample=draw_again)
    trained += cut_off(other, STEPS)
    data = read_data(run.job, run.directory)
    known = Counter(prompt.tokens for step in range(STEPS) for prompt in data.batch(step))
    assert Counter(map(tuple, trained)) == known
    line = read_lines(tmp_path / "metrics.jsonl")[SAVED]
    if (first, then, draw_again) == ("two batches in flight", "one ahead on two pools", False):
        assert line["max_staleness"] == 1  # one that was begun is older than the policy that ends it
        assert 0 < line["max_cache_gap"] < 1e-5  # its keys and values are those of the latter
    if then == "one rank" or draw_again:
        assert line["max_staleness"] == 0


def scored_on(run: RunRequest) -> list[tuple[float, float]]:
    """Two steps whose prompts are dealt backwards, as another plan may deal them: the score of each response, and the
    one that is its own."""
    batch_of = PromptData.batch

    def backwards(data: PromptData, step: int) -> tuple[Prompt, ...]:
        usual = range(step * data.batch_size, (step + 1) * data.batch_size)
        return batch_of(replace(data, reassigned={step: tuple(reversed(usual))}), step)

    found = []
    with mock.patch.object(PromptData, "batch", backwards):
        rank = RankRun(run)
        rank.recorder.open(rank.steps.start)
        for step in range(2):
            batch = rank.run_period(step)
            for row in batch.experience.rows("environment_scores"):
                tokens = tuple(batch.experience.get("tokens", row).tolist())
                words = rank.data.text(tokens[batch.prompt_length(row) :]).split()
                score = batch.experience.get("environment_scores", row).item()
                found.append((score, words.count("w3") / max(1, len(words))))
    return found


def test_rewards_of_hosts_stay_with_their_responses_whatever_rows_their_prompts_are_dealt_to(tmp_path: Path) -> None:
    reward = {"name": "third", "function": "tests.runtime.rewarding:third_word"}
    run = rewarded(write_rewarded(tmp_path, reward, algorithm="ppo", num_ranks=1), tmp_path / "run", steps=2)
    ((*scores,),) = run_on_ranks(1, scored_on, run)
    assert len({own for _, own in scores}) > 4
    assert [score for score, _ in scores] == pytest.approx([own for _, own in scores], abs=1e-6)
