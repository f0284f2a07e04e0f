"""The state of the explorer: what is changed in a job, and what is pinned. A state is an address and a command line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from meshwright.planner.analysis.plan_summary import DEFAULT_NUM_STEPS
from meshwright.planner.job.whatif_settings import Value, parse_settings
from meshwright.profiles.errors import BadInput
from meshwright.profiles.untrusted_text import whole_number
from meshwright.runtime.api.arguments import require_number

_MAX_QUERY_CHARACTERS = 8192
_MAX_PRICE = 1e9
_MAX_STEPS = 10**9


@dataclass(frozen=True)
class State:
    """The changed fields of a job's facts, by dotted path in ascending order with their values as text; pins; the price
    of a GPU-hour; and the number of steps whose cost is shown."""

    settings: tuple[tuple[str, str], ...] = ()
    pins: tuple[str, ...] = ()
    price: float | None = None
    num_steps: int = DEFAULT_NUM_STEPS

    @property
    def values(self) -> Mapping[str, Value]:
        """The changed fields with their values."""
        (setting,) = parse_settings([f"{path}={text}" for path, text in self.settings])
        return setting

    @property
    def without_pins(self) -> State:
        return replace(self, pins=())

    @property
    def searched(self) -> State:
        """The part of the state that decides which plan is best."""
        return State(self.settings, self.pins)

    @property
    def query(self) -> str:
        """The state as the query of an address."""
        pairs = [*self.settings, *(("pin", pin) for pin in self.pins)]
        if self.price is not None:
            pairs.append(("price", f"{self.price:g}"))
        if self.num_steps != DEFAULT_NUM_STEPS:
            pairs.append(("steps", str(self.num_steps)))
        return urlencode(pairs)

    def command(self, source: Path, options: Sequence[str] = ()) -> str:
        """The command line that gives the plan of this state; `options` are those of the explorer itself."""
        words = ["meshwright", "explore", str(source), *options]
        for path, text in self.settings:
            words += ["--set", f"{path}={text}"]
        for pin in self.pins:
            words += ["--pin", pin]
        if self.price is not None:
            words += ["--price", f"{self.price:g}"]
        if self.num_steps != DEFAULT_NUM_STEPS:
            words += ["--per-steps", str(self.num_steps)]
        return shlex.join([*words, "-o", "plan.json"])


def state_of(
    settings: Iterable[str], pins: Sequence[str], price: float | None = None, num_steps: int = DEFAULT_NUM_STEPS
) -> State:
    """The state of `field=value` texts and pins. Raises BadInput for a field with several values."""
    texts = tuple(settings)
    combinations = parse_settings(texts)
    if len(combinations) > 1:
        raise BadInput(
            "--set gives a field several values, and a state has one of each; `meshwright whatif` takes more."
        )
    pairs = {path: value if isinstance(value, str) else json.dumps(value) for path, value in combinations[0].items()}
    return State(tuple(sorted(pairs.items())), tuple(sorted(set(pins))), price, num_steps)


def state_from_query(query: str) -> State:
    """The state of an address's query; empty values are ignored. Raises BadInput for a value that cannot be read."""
    if len(query) > _MAX_QUERY_CHARACTERS:
        raise BadInput(f"the address has more than {_MAX_QUERY_CHARACTERS} characters; change fewer fields.")
    settings, pins, price, num_steps = [], [], None, DEFAULT_NUM_STEPS
    for name, text in parse_qsl(query):
        if name == "pin":
            pins.append(text)
        elif name == "price":
            price = _price(text)
        elif name == "steps":
            num_steps = _number_of_steps(text)
        else:
            settings.append(f"{name}={text}")
    return state_of(settings, pins, price, num_steps)


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        raise BadInput(f"price={text!r} is not a number; give the price of a GPU-hour.") from None
    require_number("price", price, minimum=0, maximum=_MAX_PRICE)
    return price


def _number_of_steps(text: str) -> int:
    number = whole_number(text)
    if number is None:
        raise BadInput(f"steps={text!r} is not a whole number; use 1 or more.")
    require_number("steps", number, minimum=1, maximum=_MAX_STEPS)
    return number
