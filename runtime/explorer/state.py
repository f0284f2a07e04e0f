"""The state of the explorer: the changes of a job, the pins, the state that it is compared with, and a grid.

A state can be written as the query of an address, and as the command lines that give the same plans.
"""

from __future__ import annotations

import itertools
import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias
from urllib.parse import parse_qsl, urlencode

from meshwright.planner.analysis.plan_summary import DEFAULT_NUM_STEPS
from meshwright.planner.job.whatif_settings import Value, parse_settings
from meshwright.profiles.errors import BadInput
from meshwright.profiles.untrusted_text import whole_number
from meshwright.runtime.api.arguments import require_number

_MAX_QUERY_CHARACTERS = 8192
_MAX_PRICE = 1e9
_MAX_STEPS = 10**9
_MAX_POINTS = 32
"""Maximum number of combinations of values in a grid; each takes a search."""

_MAX_LISTED_PINS = 3
"""Largest number of pins that are listed in the label of a state."""

Settings: TypeAlias = tuple[tuple[str, str], ...]
"""Fields by dotted path in ascending order, with their values as text."""


@dataclass(frozen=True)
class State:
    """The changed fields of a job's facts; pins; the price of a GPU-hour; and the number of steps whose cost is shown.

    `pins` are texts such as actor_train.tp=2. `compared_with` is the state beside which this one is shown, `kept` in an
    address; None means the job as given. `grid` has the fields of which all combinations of several values are planned.
    """

    settings: Settings = ()
    pins: tuple[str, ...] = ()
    price: float | None = None
    num_steps: int = DEFAULT_NUM_STEPS
    compared_with: State | None = None
    grid: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def values(self) -> Mapping[str, Value]:
        """The changed fields with their values."""
        (values,) = parse_settings([f"{path}={text}" for path, text in self.settings])  # each field has one value
        return values

    @property
    def without_pins(self) -> State:
        return replace(self, pins=())

    @cached_property
    def searched(self) -> State:
        """The part of the state that decides which plan is best; estimates and searches are kept by it."""
        return State(self.settings, self.pins)

    @property
    def reference(self) -> State:
        """The state beside which this one is shown, for as many steps, and at the same price unless it has its own."""
        other = self.compared_with or State()
        price = self.price if other.price is None else other.price
        return replace(other, price=price, num_steps=self.num_steps)

    @property
    def grid_search(self) -> State:
        """The part of the state that decides what is planned for its grid."""
        return replace(self.searched, grid=self.grid)

    @property
    def points(self) -> tuple[State, ...]:
        """The states of the grid, in the order of its values."""
        return tuple(self._points())

    def _points(self) -> Iterator[State]:
        if not self.grid:
            return
        paths = [path for path, _ in self.grid]
        for texts in itertools.product(*(texts for _, texts in self.grid)):
            settings = {**dict(self.settings), **dict(zip(paths, texts, strict=True))}
            yield State(tuple(sorted(settings.items())), self.pins, self.price, self.num_steps)

    @property
    def needed(self) -> tuple[State, ...]:
        """The states whose plans are shown with this one: itself, without pins, the reference and the grid."""
        return (self, self.without_pins, self.reference, *self.points)

    @property
    def label(self) -> str:
        """The changes in a few words."""
        pins = self.pins if len(self.pins) <= _MAX_LISTED_PINS else (f"{len(self.pins)} pins",)
        changes = [*(f"{path}={text}" for path, text in self.settings), *pins]
        return ", ".join(changes) or "as given"

    @property
    def query(self) -> str:
        """The state as the query of an address."""
        pairs = [*self.settings, *(("pin", pin) for pin in self.pins)]
        if self.price is not None:
            pairs.append(("price", f"{self.price:g}"))
        if self.num_steps != DEFAULT_NUM_STEPS:
            pairs.append(("steps", str(self.num_steps)))
        if self.compared_with is not None:
            pairs.append(("kept", self.compared_with.query))
        pairs += [("grid", f"{path}={','.join(texts)}") for path, texts in self.grid]
        return urlencode(pairs)

    def command(self, source: Path, options: Sequence[str] = (), output: str = "plan.json") -> str:
        """The command line that writes the plan of this state; `options` are those of the explorer itself."""
        return shlex.join([*self._words(source, options), "-o", output])

    def grid_command(self, source: Path, options: Sequence[str] = ()) -> str:
        """The command line that writes the plans of the grid."""
        grid = [word for path, texts in self.grid for word in ("--grid", f"{path}={','.join(texts)}")]
        return shlex.join([*self._words(source, options), *grid, "-o", "grid.json"])

    def _words(self, source: Path, options: Sequence[str]) -> Iterator[str]:
        yield from ("meshwright", "explore", str(source), *options)
        for path, text in self.settings:
            yield from ("--set", f"{path}={text}")
        for pin in self.pins:
            yield from ("--pin", pin)
        if self.price is not None:
            yield from ("--price", f"{self.price:g}")
        if self.num_steps != DEFAULT_NUM_STEPS:
            yield from ("--per-steps", str(self.num_steps))


def state_of(
    settings: Iterable[str],
    pins: Sequence[str],
    price: float | None = None,
    num_steps: int = DEFAULT_NUM_STEPS,
    *,
    grid: Iterable[str] = (),
) -> State:
    """The state of `field=value` texts, pins, and `field=value,value` texts of a grid. Raises BadInput for a changed
    field with several values, and for a grid with too many."""
    texts = tuple(settings)
    combinations = parse_settings(texts)
    if len(combinations) > 1:
        raise BadInput("--set gives a field several values, and a state has one of each; --grid takes more.")
    pairs = {path: value if isinstance(value, str) else json.dumps(value) for path, value in combinations[0].items()}
    return State(tuple(sorted(pairs.items())), tuple(sorted(set(pins))), price, num_steps, grid=_grid(grid))


def _grid(texts: Iterable[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The fields of a grid with their values. Raises BadInput for a text of another form and for too many values."""
    fields: dict[str, tuple[str, ...]] = {}
    for text in texts:
        path, equals, values = text.partition("=")
        path, parts = path.strip(), tuple(part.strip() for part in values.split(","))
        if not path or not equals or not all(parts) or any(part[0] in "[{" for part in parts):
            raise BadInput(f"--grid {text!r} is not of the form field=value,value, such as cluster.nodes=1,2,4.")
        if path in fields:
            raise BadInput(f"--grid {path} is given twice; separate several values by commas.")
        fields[path] = tuple(dict.fromkeys(parts))
    number = math.prod(map(len, fields.values()))
    if number > _MAX_POINTS:
        raise BadInput(
            f"--grid has {number} combinations of values, and each takes a search; give at most {_MAX_POINTS}."
        )
    return tuple(sorted(fields.items()))


def state_from_query(query: str) -> State:
    """The state of an address's query; empty values are ignored. Raises BadInput for a value that cannot be read."""
    if len(query) > _MAX_QUERY_CHARACTERS:
        raise BadInput(f"the address has more than {_MAX_QUERY_CHARACTERS} characters; change fewer fields.")
    settings, pins, grid, price, num_steps = [], [], [], None, DEFAULT_NUM_STEPS
    compared_with: State | None = None
    for name, text in parse_qsl(query):
        if name == "pin":
            pins.append(text)
        elif name == "price":
            price = _price(text)
        elif name == "steps":
            num_steps = _number_of_steps(text)
        elif name == "grid":
            grid.append(text)
        elif name == "kept":
            compared_with = _compared_with(text)
        else:
            settings.append(f"{name}={text}")
    state = state_of(settings, pins, price, num_steps, grid=grid)
    if compared_with is None or compared_with == State():
        return state
    return replace(state, compared_with=compared_with)


def _compared_with(query: str) -> State:
    if any(name in ("kept", "grid") for name, _ in parse_qsl(query)):
        raise BadInput("the kept state has a kept state or a grid of its own; keep a state without them.")
    return state_from_query(query)


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
