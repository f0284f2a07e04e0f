"""Versions of weights, and the staleness of the tokens sampled with them.

The version of a policy or a critic counts the steps that have trained it; all updates of one step make one version.
Training increments it, a refit carries it in the messages that carry the weights, and nothing else changes it, so a
lost refit leaves the old version. Frozen weights stay at version 0.

The staleness of a token is the trainer's version at the update minus the version that sampled the token.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.profiles.algorithms import BEHAVIOUR_LOGPROBS
from meshwright.profiles.errors import RunFailed
from meshwright.runtime.device import host
from meshwright.runtime.messages.experience import StepExperience
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.records.version_gap import AGE_ROWS, AGE_SCORE, Gap
from meshwright.runtime.training.advantages import response_mask, sampled_mask
from meshwright.runtime.training.losses import gap_shares

_REMEDY = "run again with --resume to go on from the last checkpoint."


@dataclass
class Version:
    """The version of one copy's weights on this rank."""

    copy: str
    """The stage that the copy is named after."""
    number: int | None = 0
    """Number of steps that have trained the weights; None until a first refit has written them."""

    def require(self, stage: str, step: int) -> None:
        """Raises RunFailed unless the weights are those of the start of `step`."""
        if self.number != step:
            raise RunFailed(
                f"step {step}: {stage} has {self} and needs version {step}; a refit was lost, late or one too many: "
                f"{_REMEDY}"
            )

    def increment(self) -> None:
        """Increments the version after a step of training."""
        assert self.number is not None, "weights that are trained were loaded"
        self.number += 1

    def set_version(self, received: Iterable[int]) -> None:
        """Sets the version that a refit's messages carry. Raises RunFailed if they differ, or are older than before."""
        versions = sorted(set(received))
        if len(versions) > 1:
            listed = " and ".join(map(str, versions))
            raise RunFailed(f"the refit of {self.copy} brought weights of versions {listed} together; {_REMEDY}")
        for version in versions:
            if self.number is not None and version < self.number:
                raise RunFailed(
                    f"the refit of {self.copy} brought version {version} after version {self.number}; weights arrived "
                    f"out of order: {_REMEDY}"
                )
            self.number = version

    def agreed_version(self, mesh: Mesh, step: int) -> int:
        """The version that all ranks of this rank's replica hold. Collective over the replica.

        Raises RunFailed if they hold different ones, or none.
        """
        versions = [-1 if self.number is None else self.number]
        if mesh.layout.tp * mesh.layout.pp > 1:
            local = torch.tensor(versions, device=host.device())
            per_rank = [torch.empty_like(local) for _ in range(mesh.layout.tp * mesh.layout.pp)]
            dist.all_gather(per_rank, local, group=mesh.groups.mp)
            versions = torch.cat(per_rank).tolist()
        if len(set(versions)) > 1:
            raise RunFailed(
                f"step {step}: the ranks of one replica of {self.copy} hold versions {min(versions)} to "
                f"{max(versions)} of its weights; a refit did not reach all of them: {_REMEDY}"
            )
        if versions[0] < 0:
            raise RunFailed(f"step {step}: {self.copy} has weights that no refit has filled; {_REMEDY}")
        return versions[0]

    def __str__(self) -> str:
        return "weights that no refit has filled" if self.number is None else f"weights of version {self.number}"


def staleness(batch: StepExperience, version: int, bound: int) -> Tensor:
    """The staleness of every sampled response token, [N]: steps between its policy and the update that trains on it.

    `version` is that of the weights to be updated. Raises RunFailed for a token that is staler than the bound, and for
    one sampled by a later version than that to be updated.
    """
    mask = _sampled_mask(batch, batch.rows)
    ages = version - _padded(batch, "versions", batch.rows)[mask]
    max_age, min_age = int(ages.max()), int(ages.min())
    if max_age > bound:
        raise RunFailed(
            f"step {batch.step}: a token was sampled by version {version - max_age} of the policy, {max_age} updates "
            f"before the one that uses it, and the plan allows {bound}; a refit was lost or late: {_REMEDY}"
        )
    if min_age < 0:
        raise RunFailed(
            f"step {batch.step}: a token was sampled by version {version - min_age} of the policy and version "
            f"{version} is to be trained; the sampling version may be at most {bound} updates older and never newer: "
            f"{_REMEDY}"
        )
    return ages


def scores_by_age(batch: StepExperience, version: int, bound: int) -> dict[str, float]:
    """The number of responses that each version within the bound started, and their mean scores.

    Ages differ within a batch: the version that starts a response depends on when its prompt is admitted, but the batch
    that it is delivered in depends on its length.
    """
    by_age: dict[int, list[float]] = {age: [] for age in range(bound + 1)}
    for row in batch.rows:
        first = int(batch.experience.get("versions", row)[batch.prompt_length(row) - 1])
        by_age[version - first].append(float(batch.score(row)))
    counts = {f"{AGE_ROWS}{age}": float(len(scores)) for age, scores in by_age.items()}
    return counts | {f"{AGE_SCORE}{age}": statistics.fmean(scores) for age, scores in by_age.items() if scores}


def generator_gap(batch: StepExperience, rows: Sequence[int], version: int) -> Gap:
    """The gap between behaviour and proximal log-probabilities on responses sampled by this version alone.

    `version` is that of the weights that gave the proximal log-probabilities. Responses among `rows` that an older
    version started are excluded, since their cache holds keys and values of that version.
    """
    return _gap(batch, rows, version, started_earlier=False)


def cache_gap(batch: StepExperience, rows: Sequence[int], version: int) -> Gap:
    """The gap of `generator_gap`, but on tokens that this version sampled in responses that an older version started;
    their cache holds keys and values of both."""
    return _gap(batch, rows, version, started_earlier=True)


def _gap(batch: StepExperience, rows: Sequence[int], version: int, *, started_earlier: bool) -> Gap:
    if not rows:
        return Gap()
    proximal, behaviour = (_padded(batch, name, rows) for name in ("proximal_logprobs", BEHAVIOUR_LOGPROBS))
    compared = tokens_of_version(batch, rows, version, started_earlier=started_earlier)
    shares = gap_shares(proximal, behaviour, compared)
    return Gap.split({name: float(value) for name, value in shares.items()})[0]


def tokens_of_version(
    batch: StepExperience, rows: Sequence[int], version: int, *, started_earlier: bool = False
) -> Tensor:
    """The mask [rows, width] of the predictions of tokens that a version sampled, in responses that it sampled alone,
    or with `started_earlier` in responses that an older version started."""
    mask, versions = _sampled_mask(batch, rows), _padded(batch, "versions", rows)
    of_version = (versions == version) & mask
    has_older = (mask & ~of_version).any(dim=1, keepdim=True)
    return of_version & (has_older == started_earlier)


def _sampled_mask(batch: StepExperience, rows: Sequence[int]) -> Tensor:
    """The mask [rows, width] of the predictions of sampled response tokens, without tool tokens."""
    prompts = torch.tensor([batch.prompt_length(row) for row in rows])
    totals = torch.tensor([batch.length(row) for row in rows])
    return sampled_mask(response_mask(prompts, totals - prompts, int(totals.max())), _padded(batch, "versions", rows))


def _padded(batch: StepExperience, field: str, rows: Sequence[int]) -> Tensor:
    """A field [rows, width], padded as in `_sampled_mask`."""
    return batch.experience.padded(field, rows, max(batch.length(row) for row in rows))
