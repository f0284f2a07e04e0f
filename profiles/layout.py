"""How one stage is cut over the ranks of its pool."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache

from meshwright.profiles.errors import BadInput
from meshwright.profiles.model import ModelSpec

_AXIS = re.compile(r"(tp|pp|dp)([0-9]+)$")


@dataclass(frozen=True, order=True)
class Layout:
    """Degrees of tensor (tp), pipeline (pp) and data (dp) parallelism; `sp` is sequence parallelism.

    Ranks of a pool are numbered with tp fastest, then dp, then pp.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sp: bool = False

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "dp"):
            degree = getattr(self, axis)
            if degree < 1:
                raise BadInput(f"layout {axis}={degree} is not a degree; use 1 or more.")
        if self.sp and self.tp == 1:
            raise BadInput("layout has sp with tp=1; sequence parallelism needs tp of 2 or more.")

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"tp{self.tp},pp{self.pp},dp{self.dp}" + (",sp" if self.sp else "")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout written as `tp2,pp1,dp2` with an optional `,sp`; absent axes are 1.

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

    def coordinates(self, index: int) -> tuple[int, int, int]:
        """(tp, dp, pp) coordinates of the rank at `index` within the pool."""
        return index % self.tp, index // self.tp % self.dp, index // (self.tp * self.dp)

    def index(self, *, tp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The position within the pool of the rank at these coordinates."""
        return tp + self.tp * (dp + self.dp * pp)


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors of `number`, ascending."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    high = [number // d for d in reversed(low) if d * d < number]
    return (*low, *high)


def nearest_divisor(value: int, *numbers: int) -> int:
    """The common divisor of `numbers` nearest to `value`, the smaller one on a tie."""
    common = [d for d in divisors(min(numbers)) if all(n % d == 0 for n in numbers)]
    return min(common, key=lambda d: (abs(d - value), d))


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
    if model.num_layers % layout.pp:
        legal = nearest_divisor(layout.pp, model.num_layers)
        found.append(f"pp={layout.pp} does not divide the {model.num_layers} layers of {model.name}; use pp={legal}.")
    return tuple(found)
