"""Pins: choices that the user fixes or forbids before the search, such as `actor_generate.layout=tp1,pp2,dp1`,
`actor_train.pp=1` or `actor_train.recompute!=full`.

Pins are parsed without the facts of a job. Illegal values are found where the search enumerates the choices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from meshwright.profiles.errors import BadInput, suggestion
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Offload, Recompute, Schedule, WhileWaiting
from meshwright.profiles.stages import GENERATE, StageGraph
from meshwright.profiles.untrusted_text import whole_number


@dataclass(frozen=True, order=True)
class Ranks:
    """Consecutive ranks. A pin writes them as `first:number`; `first-last` is read too."""

    first_rank: int
    num_ranks: int

    def __str__(self) -> str:
        return f"{self.first_rank}:{self.num_ranks}"

    @property
    def range_text(self) -> str:
        """The ranks as reports show them: `4-7`, or `4` for a single rank."""
        last = self.first_rank + self.num_ranks - 1
        return f"{self.first_rank}-{last}" if self.num_ranks > 1 else str(self.first_rank)

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_ranks)


DEGREES = ("tp", "pp", "dp", "ep", "etp", "cp", "vpp")
"""The degrees of a layout that may be pinned alone."""

Value: TypeAlias = Layout | Ranks | Recompute | Offload | WhileWaiting | int


@dataclass(frozen=True)
class Pin:
    """One choice of one stage, fixed or forbidden. `str` gives its canonical text."""

    stage: str
    key: str
    value: Value
    forbids: bool = False

    def __str__(self) -> str:
        return f"{self.stage}.{self.key}{'!=' if self.forbids else '='}{self.value}"

    @property
    def quoted(self) -> str:
        """The pin as error messages quote it."""
        return _quoted_pin(str(self))

    def allows(self, value: object) -> bool:
        """True if a choice may have this value under the pin's key."""
        return (value == self.value) is not self.forbids


def value_of(layout: Layout, schedule: Schedule, key: str) -> Value:
    """The value of a choice under a pin's key (other than `pool`): its layout, one degree of it, or a field of its
    schedule."""
    value: Value = layout if key == "layout" else getattr(layout if key in DEGREES else schedule, key)
    return value


def forbidden(text: str) -> str:
    """Return the text of the pin that forbids `stage.key=value`. Raises BadInput for a text of another form."""
    stage_and_key, equals, value = text.replace(" ", "").partition("=")
    if not equals or stage_and_key.endswith("!"):
        raise BadInput(f"forbid {text!r} is not of the form stage.key=value, such as actor_train.recompute=full.")
    return f"{stage_and_key}!={value}"


def parse_pin(text: str, graph: StageGraph) -> Pin:
    """Parse a pin written as `stage.key=value`, or `stage.key!=value` for one that forbids.

    Raises BadInput for an unknown stage or key and a malformed value.
    """
    match = re.match(r"([^.=!]+)\.([^.=!]+)(!?)=(.+)$", text.replace(" ", ""))
    if not match:
        raise BadInput(
            f"{_quoted_pin(text)} is not of the form stage.key=value, such as actor_generate.layout=tp1,pp2,dp1."
        )
    stage, key, forbids, value = match.groups()
    if stage not in graph.by_name:
        raise BadInput(f"{_quoted_pin(text)}: there is no stage {stage!r}; {suggestion(stage, graph.names)}")
    if key not in _PARSERS:
        raise BadInput(f"{_quoted_pin(text)}: there is no key {key!r}; {suggestion(key, _PARSERS)}")
    if key == "recompute" and not graph.by_name[stage].trains:
        raise BadInput(f"{_quoted_pin(text)}: {stage} does not train, so nothing is recomputed; remove the pin.")
    if key in _GENERATION_KEYS and not graph.by_name[stage].generates:
        raise BadInput(f"{_quoted_pin(text)}: {stage} does not generate, so it has no {key}; pin {GENERATE} instead.")
    return Pin(stage, key, _PARSERS[key](text, value), forbids=bool(forbids))


def parse_pins(texts: Iterable[str], graph: StageGraph) -> tuple[Pin, ...]:
    """Parse pins; the result is sorted and without duplicates.

    Raises BadInput if a choice is fixed to two values, or fixed and forbidden.
    """
    pins = {str(pin): pin for pin in (parse_pin(text, graph) for text in texts)}
    fixed: dict[tuple[str, str], Pin] = {}
    for pin in pins.values():
        other = pin if pin.forbids else fixed.setdefault((pin.stage, pin.key), pin)
        if other != pin:
            raise BadInput(f"{other.quoted} and {pin.quoted} fix the same choice; remove one.")
    for pin in pins.values():
        other = fixed.get((pin.stage, pin.key), pin)
        if pin.forbids and other.value == pin.value and not other.forbids:
            raise BadInput(f"{other.quoted} and {pin.quoted} exclude each other; remove one.")
    return tuple(pins[text] for text in sorted(pins))


def _quoted_pin(text: str) -> str:
    return f"forbid {text.replace('!=', '=')!r}" if "!=" in text else f"pin {text!r}"


def _parse_positive(text: str, value: str) -> int:
    number = whole_number(value)
    if not number:
        raise BadInput(f"{_quoted_pin(text)}: {value!r} is not a whole number; use 1 or more.")
    return number


def _parse_count(text: str, value: str) -> int:
    number = whole_number(value)
    if number is None:
        raise BadInput(f"{_quoted_pin(text)}: {value!r} is not a whole number; use 0 or more.")
    return number


def _parse_ranks(text: str, value: str) -> Ranks:
    first, to_last, last = value.partition("-")
    if not to_last:
        first, _, number = value.partition(":")
    first_rank, last_rank = whole_number(first), whole_number(last)
    if to_last and first_rank is not None and last_rank is not None:
        num_ranks: int | None = max(0, last_rank + 1 - first_rank)
    else:
        num_ranks = None if to_last else whole_number(number)
    if first_rank is None or not num_ranks:
        raise BadInput(f"{_quoted_pin(text)}: {value!r} is not a pool; write first:number, such as 0:4, or 0-3.")
    return Ranks(first_rank, num_ranks)


def _parse_recompute(text: str, value: str) -> Recompute:
    if value not in set(Recompute):
        hint = suggestion(value, [kind.value for kind in Recompute])
        raise BadInput(f"{_quoted_pin(text)}: there is no recomputation {value!r}; {hint}")
    return Recompute(value)


def _parse_offload(text: str, value: str) -> Offload:
    if value not in set(Offload):
        hint = suggestion(value, [kind.value for kind in Offload])
        raise BadInput(f"{_quoted_pin(text)}: nothing called {value!r} can be offloaded; {hint}")
    return Offload(value)


def _parse_while_waiting(text: str, value: str) -> WhileWaiting:
    if value not in set(WhileWaiting):
        hint = suggestion(value, [kind.value for kind in WhileWaiting])
        raise BadInput(f"{_quoted_pin(text)}: there is no while_waiting {value!r}; {hint}")
    return WhileWaiting(value)


def _parse_layout(_text: str, value: str) -> Layout:
    return Layout.parse(value)


_PARSERS: Mapping[str, Callable[[str, str], Value]] = {
    "layout": _parse_layout,
    **dict.fromkeys(DEGREES, _parse_positive),
    "pool": _parse_ranks,
    "micro_batch_size": _parse_positive,
    "micro_batch_tokens": _parse_count,
    "recompute": _parse_recompute,
    "generation_slots": _parse_positive,
    "batches_in_flight": _parse_positive,
    "overcommit": _parse_count,
    "chunk_tokens": _parse_count,
    "offload": _parse_offload,
    "while_waiting": _parse_while_waiting,
    "draft_tokens": _parse_count,
}

_GENERATION_KEYS = ("generation_slots", "batches_in_flight", "overcommit", "while_waiting", "draft_tokens")
