"""The batch of a training stage: targets over all rows, then minibatches and micro-batches with their losses.

Every training rank computes the targets of the whole batch by itself, from the same numbers in the same order, so
neither the layout nor the micro-batch size can change them.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.planner.job.algorithm_settings import (
    GRPO,
    PPO,
    CriticFreeSettings,
    Distill,
    LearningSettings,
    RewardedSettings,
)
from meshwright.planner.job.graph_losses import StageLoss
from meshwright.profiles.algorithms import BEHAVIOUR_LOGPROBS, OldLogprobs
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import (
    KEPT_TOKENS,
    TEACHER_LOGPROBS,
    TEACHER_TOP_LOGPROBS,
    TEACHER_TOP_TOKENS,
    TEACHERS,
)
from meshwright.profiles.workload import Workload
from meshwright.runtime.messages.experience import StepExperience
from meshwright.runtime.messages.sampling_masks import padded_sets
from meshwright.runtime.model.logprobs import token_logprobs
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.training.advantages import (
    ResponseRewards,
    SampledColumns,
    compute_rewards,
    critic_free_advantages,
    group_advantages,
    response_mask,
    sampled_mask,
    share_with_signal,
)
from meshwright.runtime.training.distillation import (
    distillation_advantages,
    distillation_metrics,
    distribution_loss,
    distributions_of_row,
)
from meshwright.runtime.training.losses import (
    LossShare,
    MaskedMean,
    Reference,
    experience_metrics,
    gap_shares,
    importance_weights,
    movement,
    policy_loss,
    ppo_targets,
    value_loss,
)
from meshwright.runtime.training.own_losses import AdvantageInputs, LossInputs, own_advantages, own_token_losses
from meshwright.runtime.training.trainer import MicroBatch
from meshwright.runtime.training.versions import tokens_of_version

_OPTIONAL_FIELDS = ("ref_logprobs", "values", *TEACHER_LOGPROBS.values())
"""Per-token fields that only some algorithms read."""


_SAME_VERSION = "same_version"
"""Field that marks the tokens of responses sampled only by the version to be trained, on which the loss compares the
log-probabilities of generator and trainer."""


class TrainingBatch:
    """Targets of one batch, [rows, width] each, and micro-batches of it for a stage that `reads` these fields.

    `loss` says how the stage learns; the default is how a stage of a preset without teachers does.

    With `importance_sampling` each token is weighted by the ratio of its probability under the policy before the
    update to that under the policy that sampled it (importance sampling): an older version, or one with 8-bit weights.
    Where the old log-probabilities are those of the update's own forward pass, the loss computes these weights.
    """

    def __init__(
        self,
        settings: LearningSettings,
        batch: StepExperience,
        *,
        reads: Sequence[str],
        workload: Workload,
        importance_sampling: bool = False,
        loss: StageLoss | None = None,
    ) -> None:
        rows, lengths = batch.rows, batch.lengths()
        width = max(lengths.values())
        experience = batch.experience
        prompts = torch.tensor([batch.prompt_length(row) for row in rows])
        totals = torch.tensor([lengths[row] for row in rows])
        self._settings, self._workload, self._lengths = settings, workload, lengths
        self._loss = loss or StageLoss(
            is_distillation=isinstance(settings, Distill), is_rewarded=not isinstance(settings, Distill)
        )
        self._batch = batch
        self._teachers = [role for role in TEACHERS if TEACHER_TOP_TOKENS[role] in reads]
        self._tokens = experience.padded("tokens", rows, width)
        self._masks = experience if KEPT_TOKENS in reads else None
        self._scores = torch.cat([batch.score(row) for row in rows])
        self._num_response_tokens = int((totals - prompts).sum())
        self._truncated = torch.cat([experience.get("truncated", row) for row in rows]).bool()
        self._rewards = self._compute_rewards(batch, totals - prompts)
        names = [name for name in _OPTIONAL_FIELDS if name in reads and name != self._loss.old_logprobs]
        self._fields = {name: experience.padded(name, rows, width) for name in names}
        self._fields["old_logprobs"] = experience.padded(self._loss.old_logprobs, rows, width)
        self._fields["mask"] = response_mask(prompts, totals - prompts, width)
        self._fields |= self._targets_of_turns(batch, width) if workload.turns else self._targets(self._fields)
        if self._loss.source != "recompute" and "versions" in reads:
            self._fields[_SAME_VERSION] = tokens_of_version(batch, rows, batch.step)
        behaviour = experience.padded(BEHAVIOUR_LOGPROBS, rows, width) if importance_sampling else None
        if behaviour is not None and self._loss.source == "training":
            self._fields[BEHAVIOUR_LOGPROBS] = behaviour
        elif behaviour is not None:
            old, mask = self._fields["old_logprobs"], self._fields["mask"]
            self._fields["weights"] = importance_weights(old, behaviour, mask, cap=settings.importance_cap)
        if self._loss.function and self._rewards is not None:
            rewards = self._rewards.amounts.to(self._fields["old_logprobs"].dtype)
            self._fields["rewards"] = rewards[:, None].expand(-1, width)

    def _compute_rewards(self, batch: StepExperience, num_tokens: Tensor) -> ResponseRewards | None:
        """The reward of each row; None where teachers alone score.

        `num_tokens` [B] are the tokens after the prompt, sampled tokens and tool tokens together.
        """
        if not isinstance(self._settings, RewardedSettings) or not self._loss.is_rewarded:
            return None
        return compute_rewards(
            self._scores,
            self._truncated,
            self._settings,
            sizes=torch.cat([batch.score_size(row) for row in batch.rows]),
            num_tokens=num_tokens,
            max_response=self._workload.max_response,
        )

    def _targets_of_turns(self, batch: StepExperience, width: int) -> dict[str, Tensor]:
        """Targets of multi-turn rollouts: tool tokens are masked out of the loss, and a reward after them is credited
        to the tokens sampled before them."""
        response = self._fields["mask"]
        self._fields["mask"] = sampled_mask(response, batch.experience.padded("versions", batch.rows, width))
        compaction = SampledColumns(response, self._fields["mask"])
        return compaction.restore(self._targets(compaction.compact(self._fields)))

    def _targets(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Advantages [B, S], and the other fields that the loss of this algorithm reads, such as returns."""
        settings, own = self._settings, self._loss.advantages
        weights = _loss_weights(fields["mask"], settings) if isinstance(settings, CriticFreeSettings) else {}
        if own:
            advantages = self._own_advantages(own, fields)
            returns = {"returns": advantages + fields["values"]} if "values" in fields else {}
            return {"advantages": advantages, **returns, **weights}
        if self._loss.is_distillation:
            return {"advantages": self._distillation_advantages(fields), **weights}
        if isinstance(settings, CriticFreeSettings):
            assert self._rewards is not None
            advantages = critic_free_advantages(
                response_rewards=self._rewards,
                logprobs=fields["old_logprobs"],
                ref_logprobs=fields.get("ref_logprobs"),
                mask=fields["mask"],
                settings=settings,
                group_size=self._workload.group_size,
            )
            return {"advantages": advantages, **weights}
        if not isinstance(settings, PPO) or "values" not in fields:  # a scalar head with a loss of the job's own
            return {}
        targets = ppo_targets(
            scores=self._scores,
            logprobs=fields["old_logprobs"],
            ref_logprobs=fields.get("ref_logprobs", fields["old_logprobs"]),
            values=fields["values"],
            mask=fields["mask"],
            truncated=self._truncated,
            settings=settings,
        )
        return {"advantages": targets.advantages, "returns": targets.returns}

    def _distillation_advantages(self, fields: Mapping[str, Tensor]) -> Tensor:
        """Advantages [B, S] from the sampled tokens' log-probabilities under the teachers and, in a distillation, from
        rewards. Teachers with whole distributions have a loss of their own instead."""
        old, mask = fields["old_logprobs"], fields["mask"]
        settings = self._settings if isinstance(self._settings, Distill) else Distill()
        advantages = torch.zeros_like(old)
        if not self._teachers:
            teachers = list(_teacher_fields(fields).values())
            advantages = settings.distillation_weight * distillation_advantages(teachers, old, mask, settings)
        if self._rewards is None or not isinstance(self._settings, Distill):
            return advantages
        group_size, by_std = self._workload.group_size, settings.normalise_by_std
        return advantages + group_advantages(self._rewards, mask, group_size, by_std=by_std, dtype=old.dtype)

    def _own_advantages(self, path: str, fields: Mapping[str, Tensor]) -> Tensor:
        """Advantages [B, S] by a function of the job's own."""
        inputs = AdvantageInputs(
            rewards=None if self._rewards is None else self._rewards.amounts,
            truncated=self._truncated,
            mask=fields["mask"].bool(),
            group_size=self._workload.group_size,
            fields={name: values for name, values in fields.items() if name != "mask"},
        )
        return own_advantages(path, inputs)

    def metrics(self) -> dict[str, float]:
        """Metrics of the batch before any update."""
        fields, metrics = self._fields, self._experience_metrics()
        if self._workload.turns:
            metrics["tool_tokens"] = self._num_response_tokens / len(self._scores) - metrics["response_tokens"]
        if "weights" in fields:
            metrics["importance_weight"] = float(fields["weights"].sum() / fields["mask"].sum())
        return metrics

    def _experience_metrics(self) -> dict[str, float]:
        """Scores, divergences and lengths of the batch."""
        fields, settings = self._fields, self._settings
        logprobs, mask = fields["old_logprobs"], fields["mask"]
        distilled = {}
        if isinstance(settings, Distill):
            teachers = _teacher_fields(fields)
            advantages = distillation_advantages(list(teachers.values()), logprobs, mask, settings)
            distilled = distillation_metrics(advantages, teachers, logprobs, mask, self._truncated)
        if self._rewards is None:
            return distilled
        ref_logprobs, group_size = fields.get("ref_logprobs"), self._workload.group_size
        metrics = experience_metrics(self._scores, logprobs, ref_logprobs, mask, self._truncated, rewards=self._rewards)
        # Dynamic sampling reports it over all sampled groups.
        if group_size > 1 and not self._workload.dynamic_sampling:
            metrics["groups_with_signal"] = share_with_signal(self._rewards, group_size)
        return distilled | metrics

    def num_tokens(self, rows: Sequence[int]) -> int:
        """Number of sampled response tokens of these rows: the denominator of their metrics, and of their losses unless
        `divisor` differs."""
        return int(self._fields["mask"][list(rows)].sum())

    def divisor(self, rows: Sequence[int]) -> float:
        """The denominator of the actor's loss over these rows, by `loss_mean` of the settings."""
        mean = getattr(self._settings, "loss_mean", "token")
        if mean == "token":
            return self.num_tokens(rows)
        return len(rows) * (self._workload.max_response if mean == "constant" else 1)

    def micro_batch(self, rows: Sequence[int]) -> MicroBatch:
        """A micro-batch of these rows; for their split see `profiles.packing.micro_batches`."""
        ends = [(row, self._lengths[row]) for row in rows]
        fields = {name: [values[row, :end] for row, end in ends] for name, values in self._fields.items()}
        kept = [padded_sets(self._masks, row) for row in rows] if self._masks else []
        for role in self._teachers:
            distributions = [distributions_of_row(self._batch, role, row) for row in rows]
            fields[TEACHER_TOP_TOKENS[role]] = [tokens for tokens, _ in distributions]
            fields[TEACHER_TOP_LOGPROBS[role]] = [logprobs for _, logprobs in distributions]
        return MicroBatch.pack([self._tokens[row, :end] for row, end in ends], fields, kept)


def _teacher_fields(fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The log-probabilities of each teacher by field, in the order of teachers."""
    return {name: fields[name] for name in TEACHER_LOGPROBS.values() if name in fields}


def _loss_weights(mask: Tensor, settings: CriticFreeSettings) -> dict[str, Tensor]:
    """Weights [B, S] of 1 / (tokens of the response) where the loss is a mean over responses; empty otherwise."""
    if settings.loss_mean != "sequence":
        return {}
    return {"loss_weights": torch.where(mask, 1.0 / mask.sum(1, keepdim=True).clamp(min=1), 0.0)}


def training_loss(
    spec: ModelSpec,
    mesh: Mesh,
    settings: LearningSettings,
    num_tokens: int,
    divisor: float | None = None,
    *,
    own: str | None = None,
    source: OldLogprobs = "recompute",
) -> Callable[[Tensor, MicroBatch], LossShare]:
    """The loss function that trains a model: the critic's if it has a scalar head, else the actor's, or that of a
    function of the job's `own`, as module:function. `source` has the actor's log-probabilities before the updates.

    The function takes the model's output, values [1, T] or logits [T, 1, V / tp], and the micro-batch. `num_tokens` is
    the denominator of the metrics, and of the loss unless a `divisor` is given for the actor's.
    """
    if spec.scalar_head and own:
        return functools.partial(_own_scalar_share, num_tokens=num_tokens, own=own)
    if spec.scalar_head:
        assert isinstance(settings, PPO)
        return functools.partial(_critic_share, num_tokens=num_tokens, ppo=settings)
    return functools.partial(
        _actor_share,
        group=mesh.groups.tp,
        vocab_size=spec.vocab_size,
        num_tokens=num_tokens,
        divisor=num_tokens if divisor is None else divisor,
        settings=settings,
        own=own,
        source=source,
    )


def _actor_share(
    output: Tensor,
    micro_batch: MicroBatch,
    *,
    group: dist.ProcessGroup,
    vocab_size: int,
    num_tokens: int,
    divisor: float,
    settings: LearningSettings,
    own: str | None,
    source: OldLogprobs,
) -> LossShare:
    """A micro-batch's share of the loss of a policy, from logits [T, 1, V / tp] sharded over `group`."""
    logprobs, entropy = token_logprobs(
        output,
        micro_batch.next_tokens.to(output.device).unsqueeze(0),
        group,
        vocab_size=vocab_size,
        temperature=settings.temperature,
        with_entropy=True,
        kept=micro_batch.kept_on(output.device),
    )
    fields = _fields(micro_batch, output.device)
    mean = MaskedMean(divisor, fields.get("loss_weights"))
    if own:
        loss = _own_loss(own, logprobs, entropy, fields, mean)
        log_ratio = torch.where(fields["mask"].bool(), logprobs.detach() - fields["old_logprobs"], 0.0)
        moved = movement(log_ratio, fields["mask"], num_tokens=num_tokens)
        return LossShare(loss, {name: value.detach().double() for name, value in {"own_loss": loss, **moved}.items()})
    old, weights, metrics = fields["old_logprobs"], fields.get("weights"), {}
    if _SAME_VERSION in fields:
        metrics = gap_shares(logprobs, old, fields[_SAME_VERSION])
    if source == "training":
        old = logprobs.detach()
        if BEHAVIOUR_LOGPROBS in fields:
            mask, cap = fields["mask"], settings.importance_cap
            weights = importance_weights(old, fields[BEHAVIOUR_LOGPROBS], mask, cap=cap)
            metrics["importance_weight"] = weights.double().sum() / num_tokens
    share = policy_loss(
        logprobs,
        old,
        fields["advantages"],
        fields["mask"],
        num_tokens=num_tokens,
        settings=settings,
        entropy=entropy,
        weights=weights,
        mean=mean,
        reference=_reference(fields, settings),
        ratio_cap=settings.importance_cap if source == "generator" else None,
    )
    if isinstance(settings, Distill) and any(name in fields for name in TEACHER_TOP_TOKENS.values()):
        distilled = distribution_loss(
            output,
            fields,
            group=group,
            vocab_size=vocab_size,
            num_tokens=num_tokens,
            mean=mean,
            settings=settings,
        )
        return LossShare(share.loss + distilled.loss, share.metrics | metrics | distilled.metrics)
    return LossShare(share.loss, share.metrics | metrics)


def _reference(fields: Mapping[str, Tensor], settings: LearningSettings) -> Reference | None:
    """The reference of GRPO's KL loss; None without one, and for algorithms whose KL penalty is in the reward."""
    if not isinstance(settings, GRPO) or "ref_logprobs" not in fields:
        return None
    return Reference(fields["ref_logprobs"], settings.kl_coefficient)


def _critic_share(output: Tensor, micro_batch: MicroBatch, *, num_tokens: int, ppo: PPO) -> LossShare:
    """A micro-batch's share of the critic's loss, from values [1, T]."""
    fields = _fields(micro_batch, output.device)
    return value_loss(output, fields["values"], fields["returns"], fields["mask"], num_tokens=num_tokens, settings=ppo)


def _own_scalar_share(output: Tensor, micro_batch: MicroBatch, *, num_tokens: int, own: str) -> LossShare:
    """A micro-batch's share of the loss of a scalar head by a function of the job's own, from its outputs [1, T]."""
    loss = _own_loss(own, output, None, _fields(micro_batch, output.device), MaskedMean(num_tokens))
    return LossShare(loss, {"own_loss": loss.detach().double()})


def _own_loss(
    path: str, output: Tensor, entropy: Tensor | None, fields: Mapping[str, Tensor], mean: MaskedMean
) -> Tensor:
    """The share [] of a loss that a function of the job's own computes from outputs and entropies [1, T]."""
    given = {name: values for name, values in fields.items() if name not in ("mask", "loss_weights")}
    mask = fields["mask"].bool()
    inputs = LossInputs(output=output, entropy=entropy, mask=mask, fields=given)
    return mean.share(own_token_losses(path, inputs), mask)


def _fields(micro_batch: MicroBatch, device: torch.device) -> dict[str, Tensor]:
    """The fields of a micro-batch on the device, [1, T] each."""
    return {name: values.to(device).unsqueeze(0) for name, values in micro_batch.fields.items()}


def minibatches(
    rows: Sequence[int], *, step: int, num_epochs: int, num_minibatches: int, seed: int
) -> Iterator[list[int]]:
    """Yields the rows of each update of a step: every epoch visits all rows once, in its own random order."""
    size = len(rows) // num_minibatches
    for epoch in range(num_epochs):
        order = list(rows)
        random.Random(f"{seed}/{step}/{epoch}").shuffle(order)
        for first in range(0, len(order), size):
            yield order[first : first + size]
