"""How one stage is cut over the ranks of its pool."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

from pydantic import SerializerFunctionWrapHandler, model_serializer

from meshwright.profiles.errors import BadInput
from meshwright.profiles.model_parts.stage_split import split_by_cost
from meshwright.profiles.model_shape import ModelSpec

_AXIS = re.compile(r"(tp|pp|dp|ep|etp|cp|vpp)([0-9]{1,18})$")

_RARE_AXES = ("ep", "etp", "cp", "vpp")
"""Not written where they are 1, or etp where it is tp."""


class Coordinates(NamedTuple):
    """Where a rank stands along each axis of a layout."""

    tp: int
    cp: int
    dp: int
    pp: int


class ExpertCoordinates(NamedTuple):
    """Where a rank stands along the axes that divide experts.

    `fold` numbers the ranks of a replica that whole experts are spread over, `spread` the replicas, and `edp` the ranks
    that hold the same ones.
    """

    etp: int
    cp: int
    fold: int
    spread: int
    edp: int
    pp: int


@dataclass(frozen=True, order=True)
class Layout:
    """Degrees of tensor (tp), pipeline (pp) and data (dp) parallelism; `sp` is sequence parallelism.

    Ranks of a pool are numbered with tp fastest, then cp, then dp, then pp. Experts are dealt out in `ep` equal parts,
    each cut along its width by `etp`: tp (which 0 stands for), and the parts lie on ep neighbouring replicas; or 1, and
    they lie on the tp ranks of ep / tp of them, whole (MoE parallel folding, arXiv:2504.14960). The `cp` ranks of a
    replica hold the same weights and each a part of every sequence. With `vpp` above 1 a rank holds that many chunks of
    the pipeline, which micro-batches pass in turns.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sp: bool = False
    ep: int = 1
    cp: int = 1
    vpp: int = 1
    etp: int = 0

    def __post_init__(self) -> None:
        if not self.etp:
            object.__setattr__(self, "etp", self.tp)
        for axis in ("tp", "pp", "dp", "ep", "cp", "vpp", "etp"):
            degree = getattr(self, axis)
            if degree < 1:
                raise BadInput(f"layout {axis}={degree} is not a degree; use 1 or more.")
        if self.sp and self.tp == 1:
            raise BadInput("layout has sp with tp=1; sequence parallelism needs tp of 2 or more.")
        self._check_experts()
        if self.vpp > 1 and self.pp == 1:
            raise BadInput("layout has vpp with pp=1; virtual pipeline stages need pp of 2 or more.")

    def _check_experts(self) -> None:
        if self.etp == self.tp:
            if self.dp % self.ep:
                legal = nearest_divisor(self.ep, self.dp)
                raise BadInput(f"layout ep={self.ep} does not divide dp={self.dp}; use ep={legal}.")
        elif self.etp != 1:
            raise BadInput(f"layout etp={self.etp} is neither 1 nor tp={self.tp}; use one of them.")
        elif self.ep % self.tp or self.dp % (self.ep // self.tp):
            legal = self.tp * nearest_divisor(max(1, self.ep // self.tp), self.dp)
            raise BadInput(
                f"layout ep={self.ep} with etp=1 is no multiple of tp={self.tp} that divides the {self.tp * self.dp} "
                f"ranks of tp x dp; use ep={legal}."
            )

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the axes that few plans have, where there are none."""
        found: dict[str, Any] = write(self)
        return {axis: value for axis, value in found.items() if axis not in _RARE_AXES or self._is_told(axis)}

    def _is_told(self, axis: str) -> bool:
        """Whether a rare axis is written."""
        return self.folded > 1 if axis == "etp" else getattr(self, axis) > 1

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def cut(self) -> Layout:
        """The layout without what cuts no weights: as many ranks hold each part of them, as so many replicas."""
        return replace(self, sp=False, cp=1, dp=self.dp * self.cp)

    @property
    def folded(self) -> int:
        """The ranks of one replica over which whole experts are spread: tp, or 1 where they are cut by tp instead."""
        return self.tp // self.etp

    @property
    def expert_replicas(self) -> int:
        """The neighbouring replicas that hold the experts together."""
        return self.ep // self.folded

    def slices_for(self, target: Layout) -> int:
        """Parts of the weights cut like this that make up one part cut like the target, at most."""
        of_experts = _parts_in_one(self.etp, target.etp) * _parts_in_one(self.ep, target.ep)
        return _parts_in_one(self.pp, target.pp) * max(_parts_in_one(self.tp, target.tp), of_experts)

    def __str__(self) -> str:
        rare = "".join(f",{axis}{getattr(self, axis)}" for axis in _RARE_AXES if self._is_told(axis))
        return f"tp{self.tp},pp{self.pp},dp{self.dp}{rare}{',sp' if self.sp else ''}"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout written as `tp2,pp1,dp2` with an optional `,ep2`, `,etp1`, `,cp2`, `,vpp2` and `,sp`; absent axes
        are 1, and etp is tp.

        Raises BadInput for anything else.
        """
        degrees: dict[str, int] = {}
        sp = False
        for part in text.replace(" ", "").split(","):
            match = _AXIS.match(part)
            if part == "sp" and not sp:
                sp = True
            elif match and match[1] not in degrees:
                degrees[match[1]] = int(match[2])
            else:
                raise BadInput(
                    f"layout {text!r} has the part {part!r}; write it like 'tp2,pp1,dp2' or 'tp2,pp1,dp2,sp'."
                )
        return cls(**degrees, sp=sp)

    def coordinates(self, index: int) -> Coordinates:
        """Those of the rank at `index` within the pool."""
        index, tp = divmod(index, self.tp)
        index, cp = divmod(index, self.cp)
        pp, dp = divmod(index, self.dp)
        return Coordinates(tp, cp, dp, pp)

    def expert_coordinates(self, index: int) -> ExpertCoordinates:
        """Those of the rank at `index` within the pool, numbered with etp fastest, then ep (by fold and spread), then
        edp, as Megatron-core does (`RankGenerator`)."""
        tp, cp, dp, pp = self.coordinates(index)
        edp, spread = divmod(dp, self.expert_replicas)
        fold, etp = divmod(tp, self.etp)
        return ExpertCoordinates(etp, cp, fold, spread, edp, pp)

    def ep_rank(self, tp: int, dp: int) -> int:
        """Which part of the experts the ranks at these coordinates hold."""
        return dp % self.expert_replicas * self.folded + tp // self.etp

    def index(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The position within the pool of the rank at these coordinates."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors of `number`, ascending."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    high = [number // d for d in reversed(low) if d * d < number]
    return (*low, *high)


@cache
def _parts_in_one(number: int, target: int) -> int:
    """Of so many equal parts, those that one of `target` equal parts has some of, at most."""
    return max(-(-(part + 1) * number // target) - part * number // target for part in range(target))


def nearest_divisor(value: int, *numbers: int) -> int:
    """The common divisor of `numbers` nearest to `value`, the smaller one on a tie."""
    common = [d for d in divisors(min(numbers)) if all(n % d == 0 for n in numbers)]
    return min(common, key=lambda d: (abs(d - value), d))


def layers_of_stages(model: ModelSpec, pp: int) -> tuple[int, ...]:
    """How many decoder layers each of `pp` pipeline stages holds.

    All the same number where pp divides the layers. Else, where that comes out even, the embedding counts as a layer
    and so does a vocabulary head: the first stage holds one layer fewer, and below such a head the last one too
    (Megatron-core, `account_for_embedding_in_pipeline_split` and `account_for_loss_in_pipeline_split`; Llama 3 report,
    arXiv:2407.21783, section 3.3.2). Else the costliest stage is as cheap as can be, a layer and the head costing as
    many parameters as a token passes in them: see `split_by_cost`. Raises BadInput for more stages than layers.
    """
    if pp > model.num_layers:
        raise BadInput(_too_many_stages(model, pp))
    even = _even_layers_of_stages(model.num_layers, 1 if model.scalar_head else 2, pp)
    return even or split_by_cost(model.passed_layer_params, model.passed_head_params, pp)


def comes_out_even(model: ModelSpec, pp: int) -> bool:
    """Whether the stages hold as many layers each, with the embedding and a head as a layer where they have to."""
    return bool(_even_layers_of_stages(model.num_layers, 1 if model.scalar_head else 2, pp))


def unequal_stages(model: ModelSpec, pp: int) -> tuple[int, ...]:
    """As `layers_of_stages`, where some stages hold more than others; else empty."""
    counts = layers_of_stages(model, pp)
    return counts if len(set(counts)) > 1 else ()


def layers_of_stage(model: ModelSpec, pp: int, stage: int) -> range:
    """The numbers of the layers that pipeline stage `stage` holds, counted through the whole model."""
    ends = tuple(accumulate(layers_of_stages(model, pp)))
    return range(ends[stage - 1] if stage else 0, ends[stage])


def layers_of_chunks(model: ModelSpec, pp: int, stage: int, vpp: int = 1) -> tuple[range, ...]:
    """The numbers of the layers of each chunk that pipeline stage `stage` holds.

    Chunk k of stage s is the virtual stage k x pp + s of pp x vpp (Narayanan et al., arXiv:2104.04473, section 2.2;
    Megatron-core, `get_transformer_layer_offset`), all of them of as many layers. Raises BadInput where they do not
    come out even.
    """
    if vpp == 1:
        return (layers_of_stage(model, pp, stage),)
    if model.num_layers % (pp * vpp):
        raise BadInput(_uneven_chunks(model, pp, vpp))
    each = model.num_layers // (pp * vpp)
    return tuple(range(first * each, (first + 1) * each) for first in range(stage, pp * vpp, pp))


@cache
def _even_layers_of_stages(num_layers: int, ends: int, pp: int) -> tuple[int, ...]:
    """With so many ends that count as a layer where they have to; empty where the layers do not come out even."""
    if num_layers % pp == 0:
        return (num_layers // pp,) * pp
    each, rest = divmod(num_layers + ends, pp)
    if rest or each < 2:
        return ()
    return (each - 1, *(each,) * (pp - 2), each - (ends - 1))


def _too_many_stages(model: ModelSpec, pp: int) -> str:
    return f"pp={pp} is more than the {model.num_layers} layers of {model.name}; use pp={model.num_layers} at most."


def _uneven_chunks(model: ModelSpec, pp: int, vpp: int) -> str:
    num_layers = model.num_layers
    if num_layers % pp:
        return (
            f"vpp={vpp} cuts stages of as many layers each, and pp={pp} does not divide the {num_layers} layers "
            f"of {model.name}; use vpp=1."
        )
    legal = nearest_divisor(vpp, num_layers // pp)
    return (
        f"vpp={vpp} does not divide the {num_layers // pp} layers that {model.name} has on each of pp={pp} "
        f"stages; use vpp={legal}."
    )


def _expert_violations(layout: Layout, model: ModelSpec) -> Iterator[str]:
    """Rules about how experts are dealt out."""
    if not model.experts:
        if layout.ep > 1:
            yield f"ep={layout.ep} spreads experts, and {model.name} has none; use ep=1."
        return
    num_experts, folded = model.experts.num_experts, layout.folded
    if num_experts % folded:
        yield f"etp=1 deals out the {num_experts} experts of {model.name} to tp={layout.tp} ranks; use etp={layout.tp}."
    elif num_experts % layout.ep:
        legal = folded * nearest_divisor(layout.expert_replicas, layout.dp, num_experts // folded)
        yield f"ep={layout.ep} does not divide the {num_experts} experts of {model.name}; use ep={legal}."


def layout_violations(layout: Layout, model: ModelSpec) -> tuple[str, ...]:
    """One sentence per rule of the model that the layout breaks; empty when it is legal."""
    found = []
    tp_rules = [
        ("attention heads", model.num_heads),
        ("KV heads", model.num_kv_heads),
        ("feed-forward columns", model.ffn_size),
        ("vocabulary rows", model.padded_vocab_size),
    ]
    if model.experts:
        tp_rules.append(("columns of an expert", model.experts.ffn_size))
    if model.experts and model.experts.shared_ffn_size:
        tp_rules.append(("columns of the shared experts", model.experts.shared_ffn_size))
    for what, size in tp_rules:
        if size % layout.tp:
            legal = nearest_divisor(layout.tp, *(s for _, s in tp_rules))
            found.append(f"tp={layout.tp} does not divide the {size} {what} of {model.name}; use tp={legal}.")
            break
    if layout.pp > model.num_layers:
        found.append(_too_many_stages(model, layout.pp))
    elif layout.vpp > 1 and model.num_layers % (layout.pp * layout.vpp):
        found.append(_uneven_chunks(model, layout.pp, layout.vpp))
    found += _expert_violations(layout, model)
    if layout.cp > 1 and model.experts:
        found.append(f"cp={layout.cp} divides sequences, and the experts of {model.name} take whole ones; use cp=1.")
    return tuple(found)
