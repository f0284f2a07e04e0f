"""The savings of an adapter: the trained parameters, and the stages that need no copy of the reference's weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.cost_models.cost import WEIGHTS
from meshwright.planner.plan.plan import Plan

_BYTES_PER_GIB = 2**30
_MILLION = 10**6


@dataclass(frozen=True, kw_only=True)
class AdapterSummary:
    """The adapter of a plan's actor.

    `serves` has the stages that run on another stage's copy of the actor's weights without the adapter, each with the
    stage that owns the copy; `apart` has those with a copy of their own. A copy takes `copy_bytes` on the fullest of
    its ranks; 0 if there are no such stages.
    """

    rank: int
    linears: tuple[str, ...]
    trained_params: int
    num_params: int
    serves: tuple[tuple[str, str], ...]
    apart: tuple[str, ...]
    copy_bytes: float

    @property
    def sentences(self) -> Iterator[str]:
        """Report lines."""
        yield (
            f"an adapter of rank {self.rank} on {', '.join(self.linears)}: {self.trained_params / _MILLION:,.1f} "
            f"million parameters are trained and refit, {self.num_params / _MILLION:,.1f} million are frozen"
        )
        size = f"{self.copy_bytes / _BYTES_PER_GIB:.2f} GiB a rank"
        for stage, owner in self.serves:
            yield f"no ref copy: {stage} runs on the weights of {owner} without the adapter, which saves {size}"
        for stage in self.apart:
            yield f"{stage} has its own copy of the actor's weights, {size}: no stage of the actor has its layout"


def adapter_summary(plan: Plan) -> AdapterSummary | None:
    """Return the adapter of a valid plan; None if all weights of the actor are trained."""
    spec = plan.facts.models.actor
    if spec.adapter is None:
        return None
    bases = [p for p in plan.placements if plan.stage(p.stage).base_of]
    owners = {p.stage: plan.copy_of(p.stage) for p in bases}
    return AdapterSummary(
        rank=spec.adapter.rank,
        linears=spec.adapter.targets,
        trained_params=spec.trainable_params,
        num_params=spec.num_params,
        serves=tuple((stage, owner) for stage, owner in owners.items() if owner != stage),
        apart=tuple(stage for stage, owner in owners.items() if owner == stage),
        copy_bytes=max((p.resident.amount(WEIGHTS) for p in bases), default=0.0),
    )
