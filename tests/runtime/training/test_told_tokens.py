"""What a tool told carries no loss, and what is earned behind it counts for what was drawn before."""

from __future__ import annotations

import pytest
import torch

from meshwright.planner.job.algorithm_settings import GRPO
from meshwright.profiles.environment.turns import ToolTurns
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.stages import TOOL_TOKEN_VERSION
from meshwright.profiles.workload import Workload
from meshwright.runtime.messages.experience import StepExperience
from meshwright.runtime.training.advantages import SampledColumns, generalized_advantages, response_mask, sampled_mask
from meshwright.runtime.training.losses import policy_loss
from meshwright.runtime.training.training_batch import TrainingBatch

PROMPTS, RESPONSES, WIDTH = torch.tensor([3, 2]), torch.tensor([6, 4]), 10
RESPONSE = response_mask(PROMPTS, RESPONSES, WIDTH)
VERSIONS = torch.tensor(
    [[0, 0, 4, 4, TOOL_TOKEN_VERSION, TOOL_TOKEN_VERSION, 5, 5, 0, 0], [0, 4, TOOL_TOKEN_VERSION, 4, 4, 0, 0, 0, 0, 0]]
)
DRAWN = sampled_mask(RESPONSE, VERSIONS)
FREE = GRPO(kl_coefficient=0.0)


def test_told_tokens_are_no_part_of_the_mask() -> None:
    assert DRAWN.sum(1).tolist() == [4, 3]
    assert not (DRAWN & (VERSIONS == TOOL_TOKEN_VERSION)).any()


def test_columns_come_back_to_where_they_were() -> None:
    columns, values = SampledColumns(RESPONSE, DRAWN), torch.arange(20).view(2, 10)
    closed = columns.compact({"values": values, "mask": DRAWN})
    assert closed["mask"].int().diff(dim=1).le(0).all()
    assert torch.equal(columns.restore(closed)["values"], values)


def test_advantages_pass_over_what_was_told() -> None:
    """As of rows in which the told tokens never were, their values those behind the last token included."""
    torch.manual_seed(0)
    rewards, values, cut = torch.randn(2, WIDTH), torch.randn(2, WIDTH), torch.tensor([True, False])
    columns = SampledColumns(RESPONSE, DRAWN)
    closed = columns.compact({"rewards": rewards, "values": values, "mask": DRAWN})
    found = columns.restore({"a": generalized_advantages(**closed, bootstrapped=cut, gamma=0.9, gae_lambda=0.8)})["a"]
    for row, prompt, length in zip(range(2), PROMPTS.tolist(), RESPONSES.tolist(), strict=True):
        kept = [*DRAWN[row].nonzero()[:, 0].tolist(), prompt - 1 + length]
        mask = torch.ones(1, len(kept), dtype=torch.bool)
        mask[0, -1] = False
        alone = generalized_advantages(
            rewards[row : row + 1, kept],
            values[row : row + 1, kept],
            mask,
            cut[row : row + 1],
            gamma=0.9,
            gae_lambda=0.8,
        )
        assert torch.equal(found[row, kept[:-1]], alone[0, :-1])
    assert not found[~DRAWN].any()


def learning(
    versions: torch.Tensor,
    told_logprob: float,
    settings: GRPO = FREE,
    *,
    scores: tuple[float, float] = (0.0, 1.0),
    truncated: int = 0,
) -> TrainingBatch:
    """Two samples of a prompt, whose told tokens have this log-probability before the update."""
    batch = StepExperience(step=4, rows=range(2))
    told = torch.tensor(told_logprob)
    for row, (prompt, length) in enumerate(zip(PROMPTS.tolist(), RESPONSES.tolist(), strict=True)):
        end = prompt + length
        fields = {
            "tokens": torch.arange(end),
            "prompt_lengths": torch.tensor([prompt]),
            "truncated": torch.tensor([truncated], dtype=torch.uint8),
            "scores": torch.tensor([scores[row]]),
            "versions": versions[row, :end].int(),
            "proximal_logprobs": torch.where(versions[row, :end] == TOOL_TOKEN_VERSION, told, -1.0),
            "behaviour_logprobs": torch.where(versions[row, :end] == TOOL_TOKEN_VERSION, 0.0, -1.1),
        }
        for name, values in fields.items():
            batch.experience.put(name, row, values)
    workload = Workload(
        batch_size=2,
        group_size=2,
        prompt=LengthSpec(max=3, fixed=3),
        response=LengthSpec(max=6, fixed=3),
        turns=ToolTurns(number=LengthSpec(max=2, fixed=2), result=LengthSpec(max=2, fixed=2), max_tokens=8),
    )
    reads = ("tokens", "prompt_lengths", "truncated", "scores", "proximal_logprobs", "versions")
    return TrainingBatch(settings, batch, reads=reads, workload=workload, importance_sampling=True)


def test_told_tokens_carry_no_loss_no_weight_and_no_count() -> None:
    found = learning(VERSIONS, -3.0)
    block = found.micro_batch((0, 1))
    drawn = block.fields["mask"].bool()
    assert found.num_tokens((0, 1)) == int(drawn.sum()) == 7
    for name in ("advantages", "weights"):
        assert (block.fields[name][drawn] != 0).all()
        assert not block.fields[name][~drawn].any()
    logprobs = torch.full((len(block.tokens),), -2.0, requires_grad=True)
    share = policy_loss(
        logprobs,
        block.fields["old_logprobs"],
        block.fields["advantages"],
        block.fields["mask"],
        num_tokens=found.num_tokens((0, 1)),
        settings=GRPO(kl_coefficient=0.0),
        weights=block.fields["weights"],
    )
    share.loss.backward()
    assert logprobs.grad is not None
    assert not logprobs.grad[~drawn].any()


def test_a_response_is_as_long_as_what_was_drawn_and_told() -> None:
    """Of at most 8 tokens, the last 4 of which cost up to 1: one of 6, 2 of them told, costs a half."""
    scored = learning(VERSIONS, -3.0).metrics()
    assert scored["paid_score"] == scored["score"] == 0.5
    assert scored["groups_with_signal"] == 1.0
    found = learning(VERSIONS, -3.0, FREE.model_copy(update={"overlong_tokens": 4, "overlong_penalty": 1.0})).metrics()
    assert found["score"] == 0.5
    assert found["paid_score"] == (0.0 - 0.5 + 1.0) / 2


@pytest.mark.parametrize("settings", [GRPO(missing_end_score=-1.0), GRPO(reward_clip=1.0)], ids=["end", "clip"])
def test_groups_with_signal_are_those_that_are_paid_apart(settings: GRPO) -> None:
    """Two truncated responses that were scored 5 and 10."""
    found = learning(VERSIONS, -3.0, settings, scores=(5.0, 10.0), truncated=1)
    assert found.metrics()["groups_with_signal"] == 0.0
    assert not found.micro_batch((0, 1)).fields["advantages"].any()
    apart = learning(VERSIONS, -3.0, FREE, scores=(5.0, 10.0), truncated=1)
    assert apart.metrics()["groups_with_signal"] == 1.0
    assert apart.micro_batch((0, 1)).fields["advantages"].any()


def test_what_told_tokens_are_said_to_be_worth_changes_nothing() -> None:
    one, other = (learning(VERSIONS, told) for told in (-3.0, float("nan")))
    assert one.metrics() == other.metrics()
    assert one.metrics()["tool_tokens"] == 1.5
    for name in ("advantages", "weights", "mask"):
        assert torch.equal(one.micro_batch((0, 1)).fields[name], other.micro_batch((0, 1)).fields[name])
