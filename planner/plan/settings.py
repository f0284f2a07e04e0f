"""Facts with some fields set otherwise: `cluster.nodes=8`, `workload.response.p99=2048,4096`.

A field is named by its dotted path in the facts of a plan. Devices and networks may be given by name.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.job_limits import require_possible
from meshwright.profiles.devices import device_named, network_named
from meshwright.profiles.documents import parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.values import DoubledKeyError, load_json

Value: TypeAlias = Any
"""Plain data: a number, a text, a list, an object."""

Setting: TypeAlias = Mapping[str, Value]
"""One value for each of some fields, by dotted path."""

_LEFT_OUT = ("generation_weights",)
"""What facts do not say where it has its default, and may be set."""

_LINKS = ("intra_node", "inter_node", "between")

_MOST_NAMES = 3
"""Of similar fields that an error tells."""

_MOST_SETTINGS = 1000
"""Combinations of values: each is costed, and is a row of an answer."""


def parse_settings(texts: Sequence[str]) -> tuple[Setting, ...]:
    """Every combination of the values of `path=value` texts; several values are separated by commas.

    Raises BadInput for a text of another form and for a path that is given twice.
    """
    ranges: dict[str, tuple[Value, ...]] = {}
    for text in texts:
        path, equals, values = text.partition("=")
        path = path.strip()
        if not path or not equals or not values.strip():
            raise BadInput(f"--set {text!r} is not of the form field=value, such as cluster.nodes=8.")
        if path in ranges:
            raise BadInput(f"--set {path} is given twice; separate several values by commas.")
        ranges[path] = _values(values)
    number = math.prod(map(len, ranges.values()))
    if number > _MOST_SETTINGS:
        raise BadInput(f"--set asks for {number} combinations of values; give {_MOST_SETTINGS} at most.")
    return tuple(dict(zip(ranges, combination, strict=True)) for combination in itertools.product(*ranges.values()))


def _values(text: str) -> tuple[Value, ...]:
    """A list or an object is one value; otherwise commas separate values."""
    if text.strip()[0] in "[{":
        return (_value(text),)
    return tuple(_value(part.strip()) for part in text.split(","))


def _value(text: str) -> Value:
    """The JSON value, else the text itself. Raises BadInput for a number that is none."""
    try:
        value = load_json(text)
    except DoubledKeyError as error:
        raise BadInput(f"--set: {error}.") from None
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and not math.isfinite(value):
        raise BadInput(f"--set: {text} is no finite number; write one.")
    return value


def with_setting(facts: Facts, setting: Setting) -> Facts:
    """The facts with these fields set. Raises BadInput for an unknown field, naming the nearest, or a bad value."""
    tree = json.loads(facts.model_dump_json())
    known = tuple(dict.fromkeys((*_paths(tree), *_LEFT_OUT)))
    for path, value in setting.items():
        if path not in known:
            raise BadInput(f"--set {path}: the plan's facts have no such field; {_nearest(path, known)}")
        _assign(tree, path, value)
    told = ", ".join(f"{path}={value}" for path, value in setting.items())
    found = parse(Facts, json.dumps(tree), f"--set {told}")
    require_possible(found.models.by_name, found.cluster, found.workload, f"--set {told}")
    return found


def _assign(tree: dict[str, Any], path: str, value: Value) -> None:
    """Sets one field; a device that is named brings its own links."""
    *parents, last = path.split(".")
    inside: Any = tree
    for parent in parents:
        inside = inside[int(parent) if isinstance(inside, list) else parent]
    if last == "device" and isinstance(value, str):
        device, intra_node, host = device_named(value)
        links = {"device": device, "intra_node": intra_node, "host": host}
        inside |= {name: json.loads(link.model_dump_json()) for name, link in links.items()}
        return
    if last in _LINKS and isinstance(value, str):
        value = json.loads(network_named(value).model_dump_json())
    inside[last] = value


def _paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted path of every field, those that hold other fields included; members of a list are numbered."""
    for name, value in tree.items():
        yield prefix + name
        members = enumerate(value) if isinstance(value, list) else ()
        holders = {str(index): member for index, member in members if isinstance(member, dict)}
        for holder, fields in holders.items():
            yield from _paths(fields, f"{prefix}{name}.{holder}.")
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{name}.")


def _nearest(path: str, known: Sequence[str]) -> str:
    """The clause "did you mean ...?": fields with the same last name, else the most similar paths, else the roots."""
    last = path.rpartition(".")[2]
    same = [name for name in known if name.rpartition(".")[2] == last]
    close = same or difflib.get_close_matches(path, known, n=_MOST_NAMES)
    if close:
        return f"did you mean {' or '.join(close[:_MOST_NAMES])}?"
    return f"known: {', '.join(sorted({name.partition('.')[0] for name in known}))} and the fields in them."
