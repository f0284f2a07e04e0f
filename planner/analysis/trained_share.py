"""What an adapter saves: which weights are trained, and where the reference needs no copy of the actor's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.cost_models.cost import WEIGHTS
from meshwright.planner.plan.plan import Plan

_GIB = 2**30
_MILLION = 10**6


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """The adapter of a plan's actor. `serves` names the stages that run on a copy of the actor's weights without the
    adapter, each with the stage that the copy is named for, and `apart` those whose copy is their own; a copy takes
    `copy_bytes` on the fullest of its ranks, 0 where there is none of these stages."""

    rank: int
    linears: tuple[str, ...]
    trained_params: int
    num_params: int
    serves: tuple[tuple[str, str], ...]
    apart: tuple[str, ...]
    copy_bytes: float

    @property
    def sentences(self) -> Iterator[str]:
        """What there is to tell, for people."""
        yield (
            f"an adapter of rank {self.rank} beside {', '.join(self.linears)}: {self.trained_params / _MILLION:,.1f} "
            f"million parameters are trained and refit, beside {self.num_params / _MILLION:,.1f} million that stay"
        )
        size = f"{self.copy_bytes / _GIB:.2f} GiB a rank"
        for stage, owner in self.serves:
            yield f"no ref copy: {stage} runs on the weights of {owner} without the adapter, which saves {size}"
        for stage in self.apart:
            yield f"{stage} has a copy of the actor's weights of its own, {size}: no stage of the actor is cut like it"


def adapted(plan: Plan) -> Adapted | None:
    """Of a valid plan; None where all weights of the actor are trained."""
    spec = plan.facts.models.actor
    if spec.adapter is None:
        return None
    bases = [p for p in plan.placements if plan.stage(p.stage).base_of]
    owners = {p.stage: plan.copy_of(p.stage) for p in bases}
    return Adapted(
        rank=spec.adapter.rank,
        linears=spec.adapter.targets,
        trained_params=spec.trained_params,
        num_params=spec.num_params,
        serves=tuple((stage, owner) for stage, owner in owners.items() if owner != stage),
        apart=tuple(stage for stage, owner in owners.items() if owner == stage),
        copy_bytes=max((p.resident.amount(WEIGHTS) for p in bases), default=0.0),
    )
