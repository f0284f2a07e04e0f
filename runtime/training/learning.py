"""The batch as a training stage sees it: advantages and returns over all rows, cut into minibatches and micro-batches.

Every training rank computes the targets of the whole batch by itself, from the same numbers in the same order, so that
neither the layout nor the micro-batches can change them.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.planner.plan.ppo_settings import PPO
from meshwright.profiles.model_shape import ModelSpec
from meshwright.runtime.messages.step_experience import StepExperience
from meshwright.runtime.model.logprobs import token_logprobs
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.training.advantages import response_mask
from meshwright.runtime.training.bodies import MicroBatch
from meshwright.runtime.training.ppo import (
    LossShare,
    experience_metrics,
    importance_weights,
    policy_loss,
    targets,
    value_loss,
)


class Learning:
    """Targets of one batch, [rows, width] each, and the micro-batches cut from it.

    With a bound on staleness above 0, tokens are weighted by how likely the policy before the update is to draw them
    against the one that drew them.
    """

    def __init__(self, ppo: PPO, batch: StepExperience, *, max_staleness: int = 0) -> None:
        rows, lengths = batch.rows, batch.lengths()
        width = max(lengths.values())
        experience = batch.experience
        prompts = torch.tensor([batch.prompt_length(row) for row in rows])
        totals = torch.tensor([lengths[row] for row in rows])
        self._ppo, self._lengths = ppo, lengths
        self._tokens = experience.padded("tokens", rows, width)
        self._scores = torch.cat([experience.get("scores", row) for row in rows])
        self._truncated = torch.cat([experience.get("truncated", row) for row in rows]).bool()
        self._fields = {name: experience.padded(name, rows, width) for name in ("ref_logprobs", "values")}
        self._fields["old_logprobs"] = experience.padded("proximal_logprobs", rows, width)
        self._fields["mask"] = response_mask(prompts, totals - prompts, width)
        goals = targets(
            scores=self._scores,
            logprobs=self._fields["old_logprobs"],
            ref_logprobs=self._fields["ref_logprobs"],
            values=self._fields["values"],
            mask=self._fields["mask"],
            truncated=self._truncated,
            settings=ppo,
        )
        self._fields |= {"advantages": goals.advantages, "returns": goals.returns}
        if max_staleness:
            behaviour = experience.padded("behaviour_logprobs", rows, width)
            old, mask = self._fields["old_logprobs"], self._fields["mask"]
            self._fields["weights"] = importance_weights(old, behaviour, mask, cap=ppo.importance_cap)

    def metrics(self) -> dict[str, float]:
        """What is reported of the batch, before any update."""
        fields = self._fields
        reported = experience_metrics(
            self._scores,
            fields["old_logprobs"],
            fields["ref_logprobs"],
            fields["mask"],
            self._truncated,
            settings=self._ppo,
        )
        if "weights" in fields:
            reported["importance_weight"] = float(fields["weights"].sum() / fields["mask"].sum())
        return reported

    def num_tokens(self, rows: Sequence[int]) -> int:
        """Response tokens of these rows: the denominator of their losses."""
        return int(self._fields["mask"][list(rows)].sum())

    def block(self, rows: Sequence[int]) -> MicroBatch:
        """A micro-batch of these rows."""
        ends = [(row, self._lengths[row]) for row in rows]
        fields = {name: [values[row, :end] for row, end in ends] for name, values in self._fields.items()}
        return MicroBatch.of([self._tokens[row, :end] for row, end in ends], fields)


def training_loss(spec: ModelSpec, mesh: Mesh, ppo: PPO, num_tokens: int) -> Callable[[Tensor, MicroBatch], LossShare]:
    """The loss that trains a model: the critic's where it has a scalar head, else the actor's.

    Of values [1, T], or of logits [T, 1, V / tp]; `num_tokens` is its denominator.
    """
    if spec.scalar_head:
        return functools.partial(_critic_share, num_tokens=num_tokens, ppo=ppo)
    return functools.partial(
        _actor_share, group=mesh.groups.tp, vocab_size=spec.vocab_size, num_tokens=num_tokens, ppo=ppo
    )


def _actor_share(
    output: Tensor,
    block: MicroBatch,
    *,
    group: dist.ProcessGroup,
    vocab_size: int,
    num_tokens: int,
    ppo: PPO,
) -> LossShare:
    """A micro-batch's share of the actor's loss, from logits [T, 1, V / tp] cut over `group`."""
    logprobs, entropy = token_logprobs(
        output,
        block.next_tokens.to(output.device).unsqueeze(0),
        group,
        vocab_size=vocab_size,
        temperature=ppo.temperature,
        with_entropy=True,
    )
    fields = _fields(block, output.device)
    return policy_loss(
        logprobs,
        fields["old_logprobs"],
        fields["advantages"],
        fields["mask"],
        num_tokens=num_tokens,
        settings=ppo,
        entropy=entropy,
        weights=fields.get("weights"),
    )


def _critic_share(output: Tensor, block: MicroBatch, *, num_tokens: int, ppo: PPO) -> LossShare:
    """A micro-batch's share of the critic's loss, from values [1, T]."""
    fields = _fields(block, output.device)
    return value_loss(output, fields["values"], fields["returns"], fields["mask"], num_tokens=num_tokens, settings=ppo)


def _fields(block: MicroBatch, device: torch.device) -> dict[str, Tensor]:
    """[1, T] each, on the device."""
    return {name: values.to(device).unsqueeze(0) for name, values in block.fields.items()}


def minibatches(
    rows: Sequence[int], *, step: int, num_epochs: int, num_minibatches: int, seed: int
) -> Iterator[list[int]]:
    """The rows of each update of a step: every epoch visits all rows once, in an order of its own."""
    size = len(rows) // num_minibatches
    for epoch in range(num_epochs):
        order = list(rows)
        random.Random(f"{seed}/{step}/{epoch}").shuffle(order)
        for first in range(0, len(order), size):
            yield order[first : first + size]
