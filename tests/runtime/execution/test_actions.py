"""What stages do with a batch: answers of the right sizes, one version a step, and nothing that was done before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.errors import RunFailed
from meshwright.profiles.stages import field_type
from meshwright.runtime.execution.megatron_device import StageRunner
from meshwright.runtime.messages.experience import StepExperience
from meshwright.runtime.records.results import InstructionResult
from meshwright.runtime.training.bad_steps import SKIPPED, read_skipped
from meshwright.runtime.training.trainer import MicroBatch, forward_scalars
from tests.runtime.one_rank import OneRank, one_rank
from tests.runtime.ranks import run_on_ranks
from tests.runtime.small_job import write_job

SCORING = ("reward_score", "ref_logprob", "critic_value", "actor_logprob")
FIELDS = tuple(field for name in ("actor_generate", *SCORING) for field in PPO_GRAPH.by_name[name].writes)
BATCH = 16

Held = dict[str, dict[int, Tensor]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"), num_ranks=1)


def opened(path: Path, steps: range) -> tuple[OneRank, StageRunner]:
    rank = one_rank(path)
    return rank, rank.actions(steps)


def _one_turn(path: Path) -> tuple[Held, list[Tensor], dict[str, Mapping[str, float]], str]:
    """What a turn leaves in its batch, what the reward model says of every token of it, what each stage tells, and what
    is said of a stage that comes when the weights have been trained."""
    (rank, actions), batch = opened(path, range(2)), StepExperience(step=0, rows=range(BATCH))
    actions.begin(0)
    told = {stage: actions.run(stage, batch).facts for stage in ("actor_generate", *SCORING)}
    reward = rank.copies["reward_score"]
    rows = [batch.experience.get("tokens", row) for row in batch.rows]
    said = [forward_scalars(reward.decoder, reward.mesh, [MicroBatch.pack([row])])[0] for row in rows]
    told |= {stage: actions.run(stage, batch).metrics for stage in ("critic_train", "actor_train")}
    try:
        actions.run("actor_logprob", batch)
        refusal = "nothing was said"
    except RunFailed as error:
        refusal = str(error)
    return {name: dict(rows) for name, rows in batch.experience.fields().items()}, said, told, refusal


@pytest.fixture(scope="module")
def turn(path: Path) -> tuple[Held, list[Tensor], dict[str, Mapping[str, float]], str]:
    [found] = run_on_ranks(1, _one_turn, path)
    return found


def test_every_field_has_a_value_for_each_token_or_one_for_the_row(turn: tuple[Held, Any, Any, Any]) -> None:
    held, *_ = turn
    assert set(held) == set(FIELDS)
    for field, rows in held.items():
        assert sorted(rows) == list(range(BATCH))
        for row, values in rows.items():
            assert len(values) == (1 if field_type(field).per_sequence else len(held["tokens"][row])), field
            assert values.dtype is getattr(torch, field_type(field).dtype), field


def test_a_score_is_what_is_said_at_the_last_token_and_the_last_log_probability_is_nothing(
    turn: tuple[Held, list[Tensor], Any, Any],
) -> None:
    held, said, *_ = turn
    for row, of_tokens in enumerate(said):
        torch.testing.assert_close(held["scores"][row], of_tokens[-1:], atol=1e-5, rtol=0)
        for field in ("ref_logprobs", "proximal_logprobs"):
            assert held[field][row][-1] == 0
            assert (held[field][row][:-1] < 0).all()


def test_the_reference_says_what_the_policy_says_before_it_is_trained(turn: tuple[Held, Any, Any, Any]) -> None:
    held, *_ = turn
    for row, logprobs in held["ref_logprobs"].items():
        torch.testing.assert_close(held["proximal_logprobs"][row], logprobs, atol=1e-6, rtol=0)


def test_training_tells_of_its_role_and_raises_the_version(
    turn: tuple[Any, Any, dict[str, Mapping[str, float]], str],
) -> None:
    _, _, told, refusal = turn
    assert {"actor_grad_norm", "actor_learning_rate", "policy_loss", "max_staleness", "score"} <= told[
        "actor_train"
    ].keys()
    assert {"critic_grad_norm", "critic_learning_rate", "value_loss"} <= told["critic_train"].keys()
    assert "score" not in told["critic_train"]
    assert told["actor_train"]["max_staleness"] == 0
    assert told["actor_train"]["skipped_updates"] == 0
    assert "actor_logprob has weights of version 1 and needs version 0" in refusal


def _broken(path: Path, out: Path) -> tuple[list[dict[str, Mapping[str, float]]], str, bool]:
    """What training tells of a batch with a score that is no number and of the next, what is said after two more bad
    ones, and whether the first left the weights alone."""
    rank = one_rank(path)
    actions, told = rank.actions(range(5), out), []
    actor = rank.copies["actor_train"].decoder
    before = [parameter.detach().clone() for parameter in actor.parameters()]
    spared, said = False, ""
    for step in range(5):
        batch = StepExperience(step=step, rows=range(BATCH))
        actions.begin(step)
        for stage in ("actor_generate", *SCORING):
            actions.run(stage, batch)
        if step != 1:
            batch.experience.put("scores", 3, torch.tensor([math.nan]))
        try:
            told.append({stage: actions.run(stage, batch).metrics for stage in ("critic_train", "actor_train")})
        except RunFailed as error:
            return told, str(error), spared
        if step == 0:
            spared = all(torch.equal(a, b) for a, b in zip(before, actor.parameters(), strict=True))
        for copy in rank.copies.values():
            copy.version.number = step + 1
    return told, said, spared


def test_a_step_with_a_score_that_is_no_number_is_skipped_and_kept_and_three_in_a_row_end_the_run(
    path: Path, tmp_path: Path
) -> None:
    [(told, said, spared)] = run_on_ranks(1, _broken, path, tmp_path)
    assert spared
    assert [line["actor_train"]["actor_bad_updates"] for line in told] == [2, 0, 2, 2]
    assert [line["critic_train"]["critic_bad_updates"] for line in told] == [2, 0, 2, 2]
    assert all(math.isfinite(value) for line in told for stage in line.values() for value in stage.values())
    assert "score" not in told[0]["actor_train"]
    assert told[0]["actor_train"]["response_tokens"] > 0
    assert (
        "critic_train skipped updates in 3 steps in a row, the last in step 4: scores of rows 3 are not finite" in said
    )
    kept = read_skipped(tmp_path / SKIPPED / "step-000000-actor_train.safetensors")
    assert kept.reasons == ("scores of rows 3 are not finite",)


def _restored(path: Path) -> tuple[InstructionResult, InstructionResult, InstructionResult]:
    """What a stage tells of a batch that was filled before the run stopped, of the turn before the first, and of two
    steps that it has to do."""
    (_, actions), old = opened(path, range(5, 8)), StepExperience(step=5, rows=range(BATCH))
    for row in (3, 4):
        old.experience.put("scores", row, torch.zeros(1))
        old.experience.put("tokens", row, torch.arange(5))
    actions.restore(None, 6)
    actions.begin(4)
    known = actions.run("reward_score", old)
    new = StepExperience(step=6, rows=range(2))
    for row in new.rows:
        new.experience.put("tokens", row, torch.arange(5 + row))
    later = actions.run("reward_score", new)
    actions.begin(5)
    full = StepExperience(step=5, rows=range(2), experience=new.experience)
    return known, later, actions.run("reward_score", full)


def test_what_a_run_did_ahead_before_it_stopped_is_not_done_again(path: Path) -> None:
    [(known, later, again)] = run_on_ranks(1, _restored, path)
    assert known == InstructionResult(facts={"num_restored_rows": 2})
    assert later == again == InstructionResult(facts={"num_tokens": 11})
