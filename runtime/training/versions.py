"""Which version weights are of, measured: it moves with the weights, and what they make is stamped with it.

The version of a policy or a critic counts the steps that have trained it; the updates of one step are one version.
Training raises it, a refit brings it in the messages that bring the weights, and nothing else changes it, so that a
refit that did not happen leaves the old one. Frozen weights are of version 0 for ever.

The staleness of a token is the trainer's version at the update less the version that drew the token.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.profiles.errors import RunFailed
from meshwright.runtime.device import host
from meshwright.runtime.messages.step_experience import StepExperience
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.records.version_gap import AGE_ROWS, AGE_SCORE, Gap
from meshwright.runtime.training.advantages import response_mask
from meshwright.runtime.training.told_tokens import drawn_mask

_WAY_OUT = "run again with --resume to go on from the last checkpoint."


@dataclass
class Version:
    """That of the weights of one copy, as this rank holds them."""

    copy: str
    """The stage that the copy is named for."""
    number: int | None = 0
    """None until a first refit has filled the copy."""

    def require(self, stage: str, step: int) -> None:
        """Raises RunFailed unless the weights are those of the beginning of a step."""
        if self.number != step:
            raise RunFailed(
                f"step {step}: {stage} has {self} and needs version {step}; a refit was lost, late or one too many: "
                f"{_WAY_OUT}"
            )

    def rise(self) -> None:
        """A step has trained the weights."""
        assert self.number is not None, "weights that are trained were loaded"
        self.number += 1

    def arrive(self, found: Iterable[int]) -> None:
        """Weights have come that are of these versions. Raises RunFailed if they are mixed, or older than before."""
        versions = sorted(set(found))
        if len(versions) > 1:
            named = " and ".join(map(str, versions))
            raise RunFailed(f"the refit of {self.copy} brought weights of versions {named} together; {_WAY_OUT}")
        for version in versions:
            if self.number is not None and version < self.number:
                raise RunFailed(
                    f"the refit of {self.copy} brought version {version} after version {self.number}; weights came in "
                    f"another order than they were sent: {_WAY_OUT}"
                )
            self.number = version

    def of_replica(self, mesh: Mesh, step: int) -> int:
        """The version that all ranks of this rank's replica hold, which must all ask.

        Raises RunFailed if they hold different ones, or none.
        """
        held = [-1 if self.number is None else self.number]
        if mesh.layout.tp * mesh.layout.pp > 1:
            mine = torch.tensor(held, device=host.device())
            everyones = [torch.empty_like(mine) for _ in range(mesh.layout.tp * mesh.layout.pp)]
            dist.all_gather(everyones, mine, group=mesh.groups.mp)
            held = torch.cat(everyones).tolist()
        if len(set(held)) > 1:
            raise RunFailed(
                f"step {step}: the ranks of one replica of {self.copy} hold versions {min(held)} to {max(held)} of its "
                f"weights; a refit did not reach all of them: {_WAY_OUT}"
            )
        if held[0] < 0:
            raise RunFailed(f"step {step}: {self.copy} has weights that no refit has filled; {_WAY_OUT}")
        return held[0]

    def __str__(self) -> str:
        return "weights that no refit has filled" if self.number is None else f"weights of version {self.number}"


def staleness(batch: StepExperience, version: int, bound: int) -> Tensor:
    """Of every response token [N]: the updates between the policy that drew it and the update that uses it.

    `version` is that of the weights to be updated. Raises RunFailed for a token that is more stale than the bound, and
    for one of a policy that there was not yet.
    """
    mask = _response(batch, batch.rows)
    found = version - _padded(batch, "versions", batch.rows)[mask]
    most, least = int(found.max()), int(found.min())
    if most > bound:
        raise RunFailed(
            f"step {batch.step}: a token was drawn by version {version - most} of the policy, {most} updates before "
            f"the one that uses it, and the plan allows {bound}; a refit was lost or late: {_WAY_OUT}"
        )
    if least < 0:
        raise RunFailed(
            f"step {batch.step}: a token was drawn by version {version - least} of the policy and version {version} is "
            f"to be trained, where the plan allows {bound} updates between them and none back; {_WAY_OUT}"
        )
    return found


def scores_by_age(batch: StepExperience, version: int, bound: int) -> dict[str, float]:
    """How many responses were begun by each version that the bound allows, and their mean scores.

    Which version begins a sequence is decided by when it is admitted; which batch it is delivered in, by its length.
    """
    by_age: dict[int, list[float]] = {age: [] for age in range(bound + 1)}
    for row in batch.rows:
        first = int(batch.experience.get("versions", row)[batch.prompt_length(row) - 1])
        by_age[version - first].append(float(batch.score(row)))
    numbers = {f"{AGE_ROWS}{age}": float(len(scores)) for age, scores in by_age.items()}
    return numbers | {f"{AGE_SCORE}{age}": statistics.fmean(scores) for age, scores in by_age.items() if scores}


def generator_gap(batch: StepExperience, rows: Sequence[int], version: int) -> Gap:
    """On the responses among `rows` that were drawn by this version alone, which gave the proximal log-probabilities.

    A response that an older version began is left out: what it goes on from are keys and values of that one.
    """
    return _gap(batch, rows, version, begun_before=False)


def cache_gap(batch: StepExperience, rows: Sequence[int], version: int) -> Gap:
    """On the tokens that this version drew in responses that an older one began: their keys and values are of both."""
    return _gap(batch, rows, version, begun_before=True)


def _gap(batch: StepExperience, rows: Sequence[int], version: int, *, begun_before: bool) -> Gap:
    if not rows:
        return Gap()
    mask, versions = _response(batch, rows), _padded(batch, "versions", rows)
    drawn = (versions == version) & mask
    begun = (mask & ~drawn).any(dim=1, keepdim=True)
    apart = _padded(batch, "behaviour_logprobs", rows) - _padded(batch, "proximal_logprobs", rows)
    found = apart[drawn & (begun == begun_before)].double()
    if not len(found):
        return Gap()
    return Gap(
        total=float(found.abs().sum()),
        largest=float(found.abs().max()),
        num_tokens=len(found),
        multiplied=float(found.abs().exp().sum()),
        divergence=float((torch.expm1(-found) + found).sum()),
    )


def _response(batch: StepExperience, rows: Sequence[int]) -> Tensor:
    """The mask [rows, width] of the predictions of response tokens that were drawn."""
    prompts = torch.tensor([batch.prompt_length(row) for row in rows])
    totals = torch.tensor([batch.length(row) for row in rows])
    return drawn_mask(response_mask(prompts, totals - prompts, int(totals.max())), _padded(batch, "versions", rows))


def _padded(batch: StepExperience, field: str, rows: Sequence[int]) -> Tensor:
    """[rows, width], as `_response`."""
    return batch.experience.padded(field, rows, max(batch.length(row) for row in rows))
