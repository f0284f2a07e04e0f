"""The generation copy of the weights in 8-bit floats: its size, and how it multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.cost_models.cost import WEIGHTS
from meshwright.cost_models.params import fullest_part
from meshwright.cost_models.precision import element_bytes
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.stages import GENERATE

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class QuantisedCopy:
    """Bytes of a generation copy in 8-bit floats. `copy_bytes` is that of the fullest rank, including its embedding and
    head in the job's `precision`; `whole_bytes` is that of a copy entirely in that precision."""

    copy_bytes: float
    whole_bytes: float
    precision: str
    casts_up: bool

    @property
    def sentences(self) -> Iterator[str]:
        """Report lines."""
        yield (
            f"{GENERATE} has its linear layers in 8-bit floats: its copy is {self.copy_bytes / _GIB:.2f} GiB a rank, "
            f"{self.copy_bytes / self.whole_bytes:.0%} of one in {self.precision}, and serves no other stage"
        )
        if self.casts_up:
            yield f"a CPU casts 8-bit floats up to {self.precision} in every pass: they take less memory, and more time"
        else:
            yield "weights and activations are multiplied as 8-bit floats"
        yield "sampled tokens are slightly off the trained policy: each is weighted by its importance ratio"


def quantised_copy(plan: Plan) -> QuantisedCopy | None:
    """Return the quantised copy of a valid plan; None if its weights are in the job's precision."""
    facts = plan.facts
    if facts.generation_weights is None:
        return None
    placement = plan.placement(GENERATE)
    part = fullest_part(facts.models.spec(plan.stage(GENERATE).role), placement.layout.tp, placement.layout.pp)
    return QuantisedCopy(
        copy_bytes=placement.resident.amount(WEIGHTS, "weight scales"),
        whole_bytes=part.num_params * element_bytes(facts.precision),
        precision=facts.precision,
        casts_up=facts.cluster.kind == "cpu",
    )
