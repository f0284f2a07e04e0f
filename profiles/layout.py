"""The parallel layout of a stage on its pool: degrees of each axis, rank numbering, pipeline splits and legality."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from meshwright.profiles.errors import BadInput
from meshwright.profiles.model_shape import ModelSpec


@cache
def split_layers_by_cost(layer_costs: tuple[int, ...], head_cost: int, num_stages: int) -> tuple[int, ...]:
    """Return the number of layers on each of two or more stages; `layer_costs` and `head_cost` share a unit.

    Among all splits into consecutive non-empty stages, the cost of the costliest stage is minimised exactly; the last
    stage also has the head. Of the optimal splits, one with nearly equal numbers of layers is taken. If possible,
    all stages between the first and the last hold equally many layers (Megatron-core,
    `num_layers_in_first_pipeline_stage` and `num_layers_in_last_pipeline_stage`), and the first takes the difference.
    There must be at least one layer per stage.
    """
    stages = _Stages(layer_costs, head_cost)
    limit = stages.min_limit(num_stages)
    return _even_between(stages, limit, num_stages) or _balanced(stages, limit, num_stages)


class _Stages:
    """The layers of a model to be split into stages: costs of ranges, and the fewest stages within a cost limit."""

    def __init__(self, layer_costs: Sequence[int], head_cost: int) -> None:
        self.num_layers = len(layer_costs)
        self._costs, self._head = layer_costs, head_cost
        self._sums = (0, *accumulate(layer_costs))

    def cost(self, first: int, end: int) -> int:
        """Cost of layers `first` to `end` - 1, including the head after the last layer."""
        return self._sums[end] - self._sums[first] + self._head_after(end)

    def max_layers(self, end: int, limit: int) -> int:
        """The maximum number of layers before `end` that one stage holds within the limit."""
        return next(count for count in range(end, -1, -1) if self.cost(end - count, end) <= limit)

    def num_needed(self, end: int, limit: int) -> int:
        """The fewest stages for the layers before `end` within a limit, filled greedily from the last.

        Any larger number of stages up to the number of layers is possible too.
        """
        needed, room = 0, 0
        for number in range(end, 0, -1):
            cost = self._costs[number - 1] + self._head_after(number)
            if cost > room:
                needed, room = needed + 1, limit
            room -= cost
        return needed

    def min_limit(self, num_stages: int) -> int:
        """The minimum over all splits into `num_stages` stages of the cost of the costliest."""
        low, high = max(*self._costs, self._costs[-1] + self._head), self.cost(0, self.num_layers)
        while low < high:
            middle = (low + high) // 2
            if self.num_needed(self.num_layers, middle) <= num_stages:
                high = middle
            else:
                low = middle + 1
        return low

    def _head_after(self, end: int) -> int:
        return self._head if end == self.num_layers else 0


def _even_between(stages: _Stages, limit: int, num_stages: int) -> tuple[int, ...]:
    """A split within the limit with equally many layers between the first and the last stage, or empty."""
    num_layers, others = stages.num_layers, num_stages - 1
    last = min(stages.max_layers(num_layers, limit), -(-num_layers // num_stages))
    for each in (-(-(num_layers - last) // others), (num_layers - last) // others):
        counts = (num_layers - last - each * (others - 1), *(each,) * (others - 1), last)
        ends = accumulate(counts)
        if min(counts) > 0 and all(
            stages.cost(end - count, end) <= limit for count, end in zip(counts, ends, strict=True)
        ):
            return counts
    return ()


def _balanced(stages: _Stages, limit: int, num_stages: int) -> tuple[int, ...]:
    """A split within the limit, built from the last stage to the first.

    Each stage takes an equal share of the remaining layers: fewer if the share exceeds the limit, more if the stages
    before it could not hold the rest within the limit.
    """
    counts: list[int] = []
    end = stages.num_layers
    for before in range(num_stages - 1, -1, -1):
        largest = min(stages.max_layers(end, limit), end - before)
        share = min(largest, -(-end // (before + 1)))
        counts.append(next(n for n in range(share, largest + 1) if stages.num_needed(end - n, limit) <= before))
        end -= counts[-1]
    return tuple(reversed(counts))


_AXIS = re.compile(r"(tp|pp|dp|ep|etp|cp|vpp)([0-9]{1,18})$")

_RARE_AXES = ("ep", "etp", "cp", "vpp")
"""Axes that are written only if their degree is above 1 (etp: only if it differs from tp)."""


class Coordinates(NamedTuple):
    """Coordinates of a rank along the axes of a layout."""

    tp: int
    cp: int
    dp: int
    pp: int


class ExpertCoordinates(NamedTuple):
    """Coordinates of a rank along the axes that divide experts.

    The expert-parallel rank has two parts: `fold` counts ranks within a replica, `spread` counts replicas. `edp` counts
    the ranks that hold the same experts.
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

    Ranks of a pool are numbered with tp fastest, then cp, then dp, then pp. `ep` is expert parallelism and `etp` expert
    tensor parallelism, which is either tp (written as 0) or 1. With etp = tp, every expert is sharded over the tp ranks
    of a replica, and the experts are divided over ep neighbouring replicas. With etp = 1, experts are whole and are
    divided over the tp ranks of ep / tp replicas (MoE parallel folding, arXiv:2504.14960). The `cp` ranks of a replica
    hold the same weights and each a part of every sequence. With `vpp` above 1 a rank holds that many chunks of the
    pipeline (interleaved schedule).
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

    def _is_written(self, axis: str) -> bool:
        """True if a rare axis differs from its default."""
        return self.fold_size > 1 if axis == "etp" else getattr(self, axis) > 1

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def weight_layout(self) -> Layout:
        """The layout of the weights alone: sp and cp do not shard weights, so cp becomes data parallelism."""
        return replace(self, sp=False, cp=1, dp=self.dp * self.cp)

    @property
    def fold_size(self) -> int:
        """Number of ranks of one replica over which whole experts are divided: tp if etp is 1, and 1 if etp is tp."""
        return self.tp // self.etp

    @property
    def expert_replicas(self) -> int:
        """Number of neighbouring replicas that together hold all experts."""
        return self.ep // self.fold_size

    def max_overlapping_shards(self, target: Layout) -> int:
        """The largest number of shards of this layout that overlap one shard of the target layout."""
        expert_overlaps = _max_overlaps(self.etp, target.etp) * _max_overlaps(self.ep, target.ep)
        return _max_overlaps(self.pp, target.pp) * max(_max_overlaps(self.tp, target.tp), expert_overlaps)

    def __str__(self) -> str:
        rare = "".join(f",{axis}{getattr(self, axis)}" for axis in _RARE_AXES if self._is_written(axis))
        return f"tp{self.tp},pp{self.pp},dp{self.dp}{rare}{',sp' if self.sp else ''}"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Parse a layout such as `tp2,pp1,dp2`, with optional `,ep2`, `,etp1`, `,cp2`, `,vpp2` and `,sp`.

        Axes that are not given are 1, and etp is tp. Raises BadInput for any other text.
        """
        degrees: dict[str, int] = {}
        sp = False
        for part in text.replace(" ", "").split(","):
            match = _AXIS.match(part)
            axis = match[1] if match else part
            if axis in degrees or (axis == "sp" and sp):
                raise BadInput(f"layout {text!r} gives {axis} twice; keep one.")
            if axis == "sp":
                sp = True
            elif match:
                degrees[match[1]] = int(match[2])
            else:
                raise BadInput(
                    f"layout {text!r} has the part {part!r}; write it like 'tp2,pp1,dp2' or 'tp2,pp1,dp2,sp'."
                )
        return cls(**degrees, sp=sp)

    def coordinates(self, index: int) -> Coordinates:
        """Coordinates of the rank at `index` within the pool."""
        index, tp = divmod(index, self.tp)
        index, cp = divmod(index, self.cp)
        pp, dp = divmod(index, self.dp)
        return Coordinates(tp, cp, dp, pp)

    def expert_coordinates(self, index: int) -> ExpertCoordinates:
        """Expert coordinates of the rank at `index` within the pool.

        Ranks are numbered with etp fastest, then ep (fold, then spread), then edp, as in Megatron-core's
        `RankGenerator`.
        """
        tp, cp, dp, pp = self.coordinates(index)
        edp, spread = divmod(dp, self.expert_replicas)
        fold, etp = divmod(tp, self.etp)
        return ExpertCoordinates(etp, cp, fold, spread, edp, pp)

    def ep_rank(self, tp: int, dp: int) -> int:
        """Expert-parallel rank at these coordinates."""
        return dp % self.expert_replicas * self.fold_size + tp // self.etp

    def index(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Index within the pool of the rank at these coordinates."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of `number`, ascending."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    high = [number // d for d in reversed(low) if d * d < number]
    return (*low, *high)


@cache
def _max_overlaps(number: int, target: int) -> int:
    """The largest number of `number` equal parts of a range that overlap one of `target` equal parts of it."""
    return max(-(-(part + 1) * number // target) - part * number // target for part in range(target))


def nearest_divisor(value: int, *numbers: int) -> int:
    """Return the common divisor of `numbers` nearest to `value`, the smaller one on a tie."""
    common = [d for d in divisors(min(numbers)) if all(number % d == 0 for number in numbers)]
    return min(common, key=lambda d: (abs(d - value), d))


def layers_per_stage(model: ModelSpec, pp: int) -> tuple[int, ...]:
    """Number of decoder layers on each of `pp` pipeline stages.

    All stages hold the same number if pp divides the layers. Otherwise the embedding and a vocabulary head count as one
    layer each, if that makes the stages equal: the first stage, and with such a head the last, hold one layer fewer
    (Megatron-core, `account_for_embedding_in_pipeline_split` and `account_for_loss_in_pipeline_split`; Llama 3 report,
    arXiv:2407.21783, section 3.3.2). Otherwise the cost of the costliest stage is minimised, with the active parameters
    per token as the cost of a layer and of the head: see `split_layers_by_cost`. Raises BadInput for more stages than
    layers."""
    if pp > model.num_layers:
        raise BadInput(_too_many_stages(model, pp))
    even = _even_layers_of_stages(model.num_layers, 1 if model.scalar_head else 2, pp)
    return even or split_layers_by_cost(model.active_layer_params, model.active_head_params, pp)


def has_equal_stages(model: ModelSpec, pp: int) -> bool:
    """True if the stages are equal, counting embedding and vocabulary head as layers if necessary."""
    return bool(_even_layers_of_stages(model.num_layers, 1 if model.scalar_head else 2, pp))


def unequal_layers_per_stage(model: ModelSpec, pp: int) -> tuple[int, ...]:
    """The result of `layers_per_stage` if its numbers differ, else an empty tuple."""
    counts = layers_per_stage(model, pp)
    return counts if len(set(counts)) > 1 else ()


def stage_layers(model: ModelSpec, pp: int, stage: int) -> range:
    """Indices in the whole model of the layers on pipeline stage `stage`."""
    ends = tuple(accumulate(layers_per_stage(model, pp)))
    return range(ends[stage - 1] if stage else 0, ends[stage])


def chunk_layers(model: ModelSpec, pp: int, stage: int, vpp: int = 1) -> tuple[range, ...]:
    """Indices in the whole model of the layers of each chunk on pipeline stage `stage`.

    Chunk k of stage s is virtual stage k x pp + s of pp x vpp equal ones (Narayanan et al., arXiv:2104.04473, section
    2.2; Megatron-core, `get_transformer_layer_offset`). Raises BadInput if pp x vpp does not divide the layers.
    """
    if vpp == 1:
        return (stage_layers(model, pp, stage),)
    if model.num_layers % (pp * vpp):
        raise BadInput(_uneven_chunks(model, pp, vpp))
    each = model.num_layers // (pp * vpp)
    return tuple(range(first * each, (first + 1) * each) for first in range(stage, pp * vpp, pp))


@cache
def _even_layers_of_stages(num_layers: int, ends: int, pp: int) -> tuple[int, ...]:
    """Layers of equal stages, with `ends` (embedding, head) counting as layers if necessary, or empty."""
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
            f"vpp={vpp} needs equal pipeline stages, and pp={pp} does not divide the {num_layers} layers "
            f"of {model.name}; use vpp=1."
        )
    legal = nearest_divisor(vpp, num_layers // pp)
    return (
        f"vpp={vpp} does not divide the {num_layers // pp} layers that {model.name} has on each of pp={pp} "
        f"stages; use vpp={legal}."
    )


def _expert_violations(layout: Layout, model: ModelSpec) -> Iterator[str]:
    """One sentence per rule of expert parallelism that the layout breaks."""
    if not model.experts:
        if layout.ep > 1:
            yield f"ep={layout.ep} spreads experts, and {model.name} has none; use ep=1."
        return
    num_experts, folded = model.experts.num_experts, layout.fold_size
    if num_experts % folded:
        yield (
            f"etp=1 needs whole experts, and the {num_experts} of {model.name} are no multiple of tp={layout.tp}; "
            f"use etp={layout.tp}."
        )
    elif num_experts % layout.ep:
        legal = folded * nearest_divisor(layout.expert_replicas, layout.dp, num_experts // folded)
        yield f"ep={layout.ep} does not divide the {num_experts} experts of {model.name}; use ep={legal}."


def layout_violations(layout: Layout, model: ModelSpec) -> tuple[str, ...]:
    """One sentence per rule of the model that the layout breaks; empty if the layout is legal."""
    violations = []
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
    if model.linear:
        tp_rules.append(("key heads of a layer with a state", model.linear.num_key_heads))
        tp_rules.append(("value heads of a layer with a state", model.linear.num_value_heads))
    for what, size in tp_rules:
        if size % layout.tp:
            legal = nearest_divisor(layout.tp, *(s for _, s in tp_rules))
            violations.append(f"tp={layout.tp} does not divide the {size} {what} of {model.name}; use tp={legal}.")
            break
    if layout.pp > model.num_layers:
        violations.append(_too_many_stages(model, layout.pp))
    elif layout.vpp > 1 and model.num_layers % (layout.pp * layout.vpp):
        violations.append(_uneven_chunks(model, layout.pp, layout.vpp))
    violations += _expert_violations(layout, model)
    if layout.cp > 1 and model.experts:
        violations.append(
            f"cp={layout.cp} divides sequences, and the experts of {model.name} take whole ones; use cp=1."
        )
    elif layout.cp > 1 and model.linear:
        violations.append(
            f"cp={layout.cp} divides sequences, and layers of {model.name} pass a state along whole ones; use cp=1."
        )
    return tuple(violations)
