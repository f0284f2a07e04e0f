"""Advantages and losses that a job computes with functions of its own, named as module:function.

The functions run in every process that trains, on the tensors of `meshwright.runtime.training.advantages`. Advantages
are computed from a whole batch, and a loss per token, whose sum over the masked tokens and division are left to the
run. So neither the layout nor the micro-batches change what a function of the job's own computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from meshwright.planner.job.graph_losses import own_functions
from meshwright.planner.job.job import Job
from meshwright.profiles.errors import BadInput, RunFailed
from meshwright.profiles.function_paths import load_path


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """A whole batch, from which a function of the job's own computes advantages [B, S].

    Rows are the groups of the prompts in order. `fields` are the per-token fields that the stage reads, [B, S] each,
    such as the critic's values, and `old_logprobs`, those of the trained policy before the update.
    """

    rewards: Tensor | None
    """The reward of each row, float64 [B], after scale, clip and penalties; None for settings without rewards."""
    truncated: Tensor
    """True [B] for rows that were truncated at the length limit."""
    mask: Tensor
    """True [B, S] at the predictions of sampled tokens."""
    group_size: int
    """Samples of each prompt."""
    fields: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """A micro-batch of packed rows, for which a function of the job's own computes the loss of each token, [1, T].

    `fields` are those of the batch's targets, [1, T] each: `old_logprobs`; `advantages`, unless nothing computes them;
    `rewards`, the row's reward at each of its tokens; `weights`, the importance weights of tokens that another policy
    sampled, if there are any; and the fields that the stage reads.
    """

    output: Tensor
    """Log-probabilities of the next tokens, [1, T] fp32, or the values of a scalar head, with a gradient."""
    entropy: Tensor | None
    """Entropy of each prediction, [1, T] with a gradient; None for a scalar head."""
    mask: Tensor
    """True [1, T] at the predictions of sampled tokens; the loss of all others is ignored."""
    fields: Mapping[str, Tensor]


AdvantageFunction: TypeAlias = Callable[[AdvantageInputs], Tensor]
LossOfTokens: TypeAlias = Callable[[LossInputs], Tensor]


def require_own_functions(job: Job) -> None:
    """Raises BadInput for a loss or advantages of the job's own that cannot be loaded."""
    for _, path in own_functions(job):
        load_path(path)


def own_advantages(path: str, inputs: AdvantageInputs) -> Tensor:
    """Advantages [B, S] by a function of the job's own, zero outside the mask.

    Raises RunFailed if the function fails or returns anything else than numbers [B, S].
    """
    advantages = _called(path, inputs, inputs.mask.shape).detach()
    return torch.where(inputs.mask, advantages.to(inputs.fields["old_logprobs"].dtype), 0.0)


def own_token_losses(path: str, inputs: LossInputs) -> Tensor:
    """The loss [1, T] of each token by a function of the job's own.

    Raises RunFailed if the function fails or returns anything else than numbers [1, T] with a gradient.
    """
    losses = _called(path, inputs, inputs.output.shape)
    if not losses.requires_grad:
        raise RunFailed(f"{path} returned a loss that does not depend on inputs.output; compute it from that")
    return losses


def _called(path: str, inputs: AdvantageInputs | LossInputs, shape: torch.Size) -> Tensor:
    try:
        result = load_path(path)(inputs)
    except BadInput:
        raise
    except Exception as error:
        raise RunFailed(f"{path} failed with {type(error).__name__}: {error}; mend it, and run again") from error
    if not isinstance(result, Tensor) or result.shape != shape or not result.is_floating_point():
        found = f"{list(result.shape)} {result.dtype}" if isinstance(result, Tensor) else type(result).__name__
        raise RunFailed(f"{path} returned {found}; let it return a tensor of numbers {list(shape)}, one for each token")
    return result
