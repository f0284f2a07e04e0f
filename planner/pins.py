"""What the user fixes before the search: `actor_generate.layout=tp1,pp2,dp1`.

A pin is read here without any facts; whether its value is legal is found out where the choices are enumerated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from meshwright.profiles.errors import BadInput, suggestion
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Recompute
from meshwright.profiles.stages import STAGE_BY_NAME


@dataclass(frozen=True, order=True)
class Ranks:
    """Consecutive ranks, written `first:number`."""

    first_rank: int
    num_ranks: int

    def __str__(self) -> str:
        return f"{self.first_rank}:{self.num_ranks}"


Value: TypeAlias = Layout | Ranks | Recompute | int


@dataclass(frozen=True)
class Pin:
    """One fixed choice of one stage. `str` gives the text it was read from, in one canonical form."""

    stage: str
    key: str
    value: Value

    def __str__(self) -> str:
        return f"{self.stage}.{self.key}={self.value}"


def parse_pin(text: str) -> Pin:
    """The pin written as `stage.key=value`. Raises BadInput for an unknown stage or key and a malformed value."""
    match = re.match(r"([^.=]+)\.([^.=]+)=(.+)$", text.replace(" ", ""))
    if not match:
        raise BadInput(f"pin {text!r} is not of the form stage.key=value, such as actor_generate.layout=tp1,pp2,dp1.")
    stage, key, value = match.groups()
    if stage not in STAGE_BY_NAME:
        raise BadInput(f"pin {text!r}: there is no stage {stage!r}; {suggestion(stage, STAGE_BY_NAME)}")
    if key not in _READERS:
        raise BadInput(f"pin {text!r}: a stage has no {key!r}; {suggestion(key, _READERS)}")
    if key == "recompute" and not STAGE_BY_NAME[stage].trains:
        raise BadInput(f"pin {text!r}: {stage} does not train, so nothing is recomputed; remove the pin.")
    if key == "generation_slots" and not STAGE_BY_NAME[stage].generates:
        raise BadInput(f"pin {text!r}: {stage} does not generate, so it has no slots; pin actor_generate instead.")
    return Pin(stage, key, _READERS[key](text, value))


def parse_pins(texts: Iterable[str]) -> tuple[Pin, ...]:
    """The pins, sorted. Raises BadInput when one choice is fixed twice."""
    pins: dict[tuple[str, str], Pin] = {}
    for text in texts:
        pin = parse_pin(text)
        other = pins.setdefault((pin.stage, pin.key), pin)
        if other != pin:
            raise BadInput(f"pins {str(other)!r} and {str(pin)!r} fix the same choice; remove one.")
    return tuple(pins[key] for key in sorted(pins))


def _whole(text: str, value: str) -> int:
    if not value.isdigit() or int(value) < 1:
        raise BadInput(f"pin {text!r}: {value!r} is not a whole number; use 1 or more.")
    return int(value)


def _ranks(text: str, value: str) -> Ranks:
    match = re.match(r"([0-9]+):([0-9]+)$", value)
    if not match or int(match[2]) < 1:
        raise BadInput(f"pin {text!r}: {value!r} is not a pool; write first:number, such as 0:4.")
    return Ranks(int(match[1]), int(match[2]))


def _recompute(text: str, value: str) -> Recompute:
    if value not in set(Recompute):
        hint = suggestion(value, [kind.value for kind in Recompute])
        raise BadInput(f"pin {text!r}: there is no recomputation {value!r}; {hint}")
    return Recompute(value)


def _layout(_text: str, value: str) -> Layout:
    return Layout.parse(value)


_READERS: Mapping[str, Callable[[str, str], Value]] = {
    "layout": _layout,
    "pool": _ranks,
    "micro_batch_size": _whole,
    "recompute": _recompute,
    "generation_slots": _whole,
}
