"""What a response that was cut by length is paid: as runs once did, and as `ppo.truncation` offers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.planner.job.algorithm_settings import PPO
from meshwright.runtime.training import training_batch
from meshwright.runtime.training.advantages import generalized_advantages, token_rewards, whiten
from meshwright.runtime.training.losses import Targets, ppo_targets


@dataclass(frozen=True)
class Treatment:
    """A name, the settings that ask for it, and whether it is what no setting asks for any more."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    pays_twice: bool = False


TREATMENTS = (
    Treatment("before: score and value", pays_twice=True),
    Treatment("terminal", {"truncation": "terminal"}),
    Treatment("bootstrap", {"truncation": "bootstrap"}),
)


def targets_paid_twice(
    *,
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    values: Tensor,
    mask: Tensor,
    truncated: Tensor,
    settings: PPO,
) -> Targets:
    """Advantages and returns as they once were: a cut row is paid its score and the value behind it."""
    rewards = token_rewards(scores, logprobs, ref_logprobs, mask, kl_coefficient=settings.kl_coefficient)
    advantages = generalized_advantages(
        rewards, values, mask, truncated, gamma=settings.gamma, gae_lambda=settings.gae_lambda
    )
    returns = torch.where(mask.bool(), advantages + values, 0.0)
    return Targets(whiten(advantages, mask) if settings.whiten_advantages else advantages, returns)


@contextlib.contextmanager
def treated(treatment: Treatment) -> Iterator[None]:
    """Runs of this process learn from its targets."""
    training_batch.ppo_targets = targets_paid_twice if treatment.pays_twice else ppo_targets
    try:
        yield
    finally:
        training_batch.ppo_targets = ppo_targets


def advantages_at_ones(treatment: Treatment, *, num_tokens: int) -> tuple[list[float], list[float]]:
    """Advantages of a row that ended and of one that was cut, where every score and every value is 1.

    The critic is right: every response is worth 1, whatever its length. Nothing is left to learn.
    """
    settings = PPO(kl_coefficient=0.0, whiten_advantages=False, **treatment.settings)
    mask = torch.ones(2, num_tokens + 1, dtype=torch.bool)
    mask[:, -1] = False
    ones = torch.ones(2, num_tokens + 1)
    found = (targets_paid_twice if treatment.pays_twice else ppo_targets)(
        scores=torch.ones(2),
        logprobs=0 * ones,
        ref_logprobs=0 * ones,
        values=ones,
        mask=mask,
        truncated=torch.tensor([False, True]),
        settings=settings,
    )
    ended, cut = found.advantages[:, :-1].tolist()
    return ended, cut
