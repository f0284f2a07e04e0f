"""What a generator in 8-bit floats holds, and how it multiplies, where a job has one."""

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
    """`copy_bytes` are those of the fullest rank, its embedding and head in the `precision` of the job included;
    `whole_bytes` those of a copy that is all in it."""

    copy_bytes: float
    whole_bytes: float
    precision: str
    casts_up: bool

    @property
    def sentences(self) -> Iterator[str]:
        """What there is to tell, for people."""
        yield (
            f"{GENERATE} has its linears in 8-bit floats: its copy is {self.copy_bytes / _GIB:.2f} GiB a rank, "
            f"{self.copy_bytes / self.whole_bytes:.0%} of one in {self.precision}, and serves no other stage"
        )
        if self.casts_up:
            yield f"a CPU casts 8-bit floats up to {self.precision} in every pass: they take less memory, and more time"
        else:
            yield "8-bit floats are multiplied as they are, with what they are multiplied with made 8-bit floats too"
        yield "what is drawn is a little off the policy that is trained: each token is weighted by how much"


def quantised_copy(plan: Plan) -> QuantisedCopy | None:
    """Of a valid plan; None where weights are in the job's precision."""
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
