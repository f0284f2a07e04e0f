"""Advantages and losses that jobs of the tests name as functions of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.runtime.training.own_losses import AdvantageInputs, LossInputs


def above_the_mean(inputs: AdvantageInputs) -> Tensor:
    """The reward of each row above the mean of its group, less a twentieth of log pi - log ref of each token."""
    assert inputs.rewards is not None
    groups = inputs.rewards.view(-1, inputs.group_size)
    above = (groups - groups.mean(1, keepdim=True)).view(-1, 1)
    return above - 0.05 * (inputs.fields["old_logprobs"] - inputs.fields["ref_logprobs"])


def weighted_ratio(inputs: LossInputs) -> Tensor:
    """The ratio of the probabilities times the advantage, without a clip, less a hundredth of the entropy."""
    assert inputs.entropy is not None
    ratio = torch.where(inputs.mask, inputs.output - inputs.fields["old_logprobs"], 0.0).exp()
    return -ratio * inputs.fields["advantages"] - 0.01 * inputs.entropy


def regressed_reward(inputs: LossInputs) -> Tensor:
    """Half the squared distance of a value from the reward of its response."""
    return 0.5 * (inputs.output - inputs.fields["rewards"]).square()


def of_rows(inputs: AdvantageInputs) -> Tensor:
    """One number a row, which is not what advantages are."""
    assert inputs.rewards is not None
    return inputs.rewards


def constant(inputs: LossInputs) -> Tensor:
    """A loss that nothing can learn from."""
    return torch.zeros_like(inputs.output)


def failing(inputs: AdvantageInputs | LossInputs) -> Tensor:
    """Fails."""
    raise ValueError(f"no {sorted(inputs.fields)[0]}")
