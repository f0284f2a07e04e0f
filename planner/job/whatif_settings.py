"""What-if settings: facts with some fields replaced, such as `cluster.nodes=8` or `workload.response.p99=2048,4096`.

A field is named by its dotted path in the facts of a plan. Devices and networks may be given by name. Lengths and
latencies of calls have a further field `scale`, a factor on all of them: `workload.response.scale=2` doubles the
maximum and the distribution, and `rewards.0.latency_seconds.scale=2` every call of a reward.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from meshwright.planner.job.job import Facts
from meshwright.planner.job.limits import require_within_limits
from meshwright.profiles.documents import parse
from meshwright.profiles.environment.latency import LatencySpec
from meshwright.profiles.errors import BadInput, one_of
from meshwright.profiles.hardware import AnyCluster, device_named, network_named, require_uniform
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.untrusted_text import DuplicateKeyError, load_json, whole_number

Value: TypeAlias = Any
"""Plain data: a number, a text, a list, an object."""

Setting: TypeAlias = Mapping[str, Value]
"""New values of some fields, by dotted path."""

_LINKS = ("intra_node", "inter_node", "between")

_SCALE = "scale"
"""Last name of the path of a factor on lengths or latencies."""

_SIZES = ("gpus", "num_gpus", "devices", "num_devices", "ranks")
"""Other names of the size of a cluster."""

_MAX_SUGGESTIONS = 3
"""Maximum number of similar fields that an error message suggests."""

_SET = "--set"

SWEEP = "--sweep"
"""The option of a sweep, in messages."""

_MIN_RANGE_PARTS, _MAX_RANGE_PARTS = 2, 3
"""Numbers of a range: the first, the last and perhaps the step."""

_MAX_SETTINGS = 1000
"""Maximum number of combinations of values; each is costed or planned and becomes a row of the table."""


def parse_settings(texts: Sequence[str]) -> tuple[Setting, ...]:
    """Return all combinations of the values of `path=value` texts; commas separate several values.

    Raises BadInput for a text of another form and for a path that is given twice.
    """
    return _combinations(texts, _SET, "field=value, such as cluster.nodes=8", _parse_values)


def parse_sweep(texts: Sequence[str]) -> tuple[Setting, ...]:
    """Return all combinations of the values of `path=value,value`, `path=first:last` and `path=first:last:step` texts.

    A range is one of whole numbers, from the first up to the last, both included. Raises BadInput for a text of another
    form, a range without a number and a path that is given twice.
    """
    return _combinations(texts, SWEEP, "field=value,value or field=first:last, such as cluster.nodes=1:8", _parse_range)


def _combinations(
    texts: Sequence[str], option: str, form: str, parse_values: Callable[[str, str], tuple[Value, ...]]
) -> tuple[Setting, ...]:
    ranges: dict[str, tuple[Value, ...]] = {}
    for text in texts:
        path, equals, values = text.partition("=")
        path = path.strip()
        if not path or not equals or not values.strip():
            raise BadInput(f"{option} {text!r} is not of the form {form}.")
        if path in ranges:
            raise BadInput(f"{option} {path} is given twice; separate several values by commas.")
        ranges[path] = parse_values(values, f"{option} {path}" if option == SWEEP else option)
    number = math.prod(map(len, ranges.values()))
    if number > _MAX_SETTINGS:
        raise BadInput(f"{option} asks for {number} combinations of values; give {_MAX_SETTINGS} at most.")
    return tuple(dict(zip(ranges, combination, strict=True)) for combination in itertools.product(*ranges.values()))


def _parse_values(text: str, what: str) -> tuple[Value, ...]:
    """Parse one list or object, or values that commas separate. Messages start with `what`."""
    if text.strip()[0] in "[{":
        return (_parse_value(text, what),)
    return tuple(_parse_value(part.strip(), what) for part in text.split(","))


def _parse_range(text: str, what: str) -> tuple[Value, ...]:
    """Parse the whole numbers of `first:last` or `first:last:step`, or values that commas separate, each once."""
    if text.strip()[0] in "[{" or ":" not in text:
        values = _parse_values(text, what)
        if "" in values:
            raise BadInput(f"{what}={text} has an empty value; write it like {what}=1,2,4.")
        return tuple({json.dumps(value): value for value in values}.values())
    numbers = [whole_number(part.strip()) for part in text.split(":")]
    if not _MIN_RANGE_PARTS <= len(numbers) <= _MAX_RANGE_PARTS or None in numbers:
        raise BadInput(
            f"{what}={text} is not a range of whole numbers, first:last or first:last:step; write it like "
            f"{what}=1:8, or separate values by commas."
        )
    first, last, *rest = (number for number in numbers if number is not None)
    step = rest[0] if rest else 1
    if step < 1:
        raise BadInput(f"{what}={text} has a step of {step}; use 1 or more.")
    if last < first:
        raise BadInput(f"{what}={text} has no number, since {last} is less than {first}; write {last}:{first}.")
    numbers_in_range = range(first, last + 1, step)
    if len(numbers_in_range) > _MAX_SETTINGS:
        raise BadInput(
            f"{what}={text} has {len(numbers_in_range)} numbers; give {_MAX_SETTINGS} at most, or a larger step."
        )
    return tuple(numbers_in_range)


def _parse_value(text: str, what: str) -> Value:
    """Parse a JSON value; other text is a string. Raises BadInput for a number that is not finite."""
    try:
        value = load_json(text)
    except DuplicateKeyError as error:
        raise BadInput(f"{what}: {error}.") from None
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and not math.isfinite(value):
        raise BadInput(f"{what}: {text} is not a finite number; use one.")
    return value


def require_known_fields(facts: Facts, settings: Sequence[Setting]) -> None:
    """Raises BadInput for the first field of a sweep that the facts do not have, naming the nearest."""
    known = tuple(_paths(json.loads(facts.model_dump_json())))
    for path in dict.fromkeys(path for setting in settings for path in setting):
        _require_known(path, known, SWEEP)


def with_setting(facts: Facts, setting: Setting) -> Facts:
    """Return the facts with these fields set.

    Raises BadInput for an unknown field, naming the nearest, or a bad value.
    """
    return with_values(facts, setting, _SET)


def with_values(facts: Facts, setting: Setting, option: str) -> Facts:
    """Return the facts with these fields set by an option of the command line, which messages name.

    Raises BadInput for an unknown field, naming the nearest, or a bad value.
    """
    tree = json.loads(facts.model_dump_json())
    known = tuple(_paths(tree))
    for path, value in setting.items():
        _require_known(path, known, option)
        _assign(tree, path, value, option)
    described = f"{option} {', '.join(f'{path}={value}' for path, value in setting.items())}"
    changed = parse(Facts, json.dumps(tree), described)
    require_within_limits(changed.models.by_name, changed.cluster, changed.workload, described)
    return changed


def _require_known(path: str, known: Sequence[str], option: str) -> None:
    """Raises BadInput for a field that is not known, naming the nearest."""
    if path not in known:
        raise BadInput(f"{option} {path}: the plan's facts have no such field; {_suggestion(path, known)}")


def _assign(tree: dict[str, Any], path: str, value: Value, option: str) -> None:
    """Set one field in place; a device given by name also sets its links."""
    *parents, last = path.split(".")
    parent_node: Any = tree
    for parent in parents:
        parent_node = parent_node[int(parent) if isinstance(parent_node, list) else parent]
    if last == _SCALE:
        _require_factor(path, value, option)
        scale = _scale_lengths if LengthSpec.model_fields.keys() == parent_node.keys() else _scale_latencies
        scale(parent_node, value)
        return
    if last == "device" and isinstance(value, str):
        device, intra_node, host = device_named(value)
        links = {"device": device, "intra_node": intra_node, "host": host}
        parent_node |= {name: json.loads(link.model_dump_json()) for name, link in links.items()}
        return
    if last in _LINKS and isinstance(value, str):
        value = json.loads(network_named(value).model_dump_json())
    parent_node[last] = value


def _require_factor(path: str, factor: Value, option: str) -> None:
    """Raises BadInput unless the factor is above 0."""
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not factor > 0:
        raise BadInput(f"{option} {path}={factor}: the factor is not a number above 0; use one, such as 2.")


def _scale_lengths(lengths: dict[str, Any], factor: float) -> None:
    """Multiply the maximum and the distribution of lengths in place."""
    for name in ("max", "fixed"):
        if lengths[name] is not None:
            lengths[name] = max(1, round(lengths[name] * factor))
    for name in ("median", "p99"):
        if lengths[name] is not None:
            lengths[name] *= factor
    if lengths["histogram"] is not None:
        lengths["histogram"] = [[max(1, round(tokens * factor)), weight] for tokens, weight in lengths["histogram"]]


def _scale_latencies(latencies: dict[str, Any], factor: float) -> None:
    """Multiply the maximum and the distribution of latencies in place; the result is neither measured nor assumed."""
    for name in ("fixed", "mean", "median", "p99", "max"):
        if latencies[name] is not None:
            latencies[name] *= factor
    if latencies["histogram"] is not None:
        latencies["histogram"] = [[seconds * factor, weight] for seconds, weight in latencies["histogram"]]
    latencies |= {"measured": None, "assumed": False}


def _paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted paths of all fields, inner nodes and the scales of lengths and latencies included; members of a list
    are numbered."""
    if tree.keys() in (LengthSpec.model_fields.keys(), LatencySpec.model_fields.keys()):
        yield prefix + _SCALE
    for name, value in tree.items():
        yield prefix + name
        members = enumerate(value) if isinstance(value, list) else ()
        objects = {str(index): member for index, member in members if isinstance(member, dict)}
        for index_text, fields in objects.items():
            yield from _paths(fields, f"{prefix}{name}.{index_text}.")
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{name}.")


def _suggestion(path: str, known: Sequence[str]) -> str:
    """The clause "did you mean ...?" with fields of the same last name, or else the most similar paths; without any,
    the known roots."""
    root, dot, rest = path.partition(".")
    if dot and root in known and not any(name.startswith(f"{root}.") for name in known):
        return f"{root} has no field {rest} in this job."
    if path.rpartition(".")[2] in _SIZES:
        return "did you mean cluster.nodes or cluster.ranks_per_node?"
    last = path.rpartition(".")[2]
    same_last_name = [name for name in known if name.rpartition(".")[2] == last]
    close = same_last_name or difflib.get_close_matches(path, known, n=_MAX_SUGGESTIONS)
    if close:
        return f"did you mean {one_of(close[:_MAX_SUGGESTIONS])}?"
    return f"known: {', '.join(sorted({name.partition('.')[0] for name in known}))} and the fields in them."


def size_settings(cluster: AnyCluster, sizes: Sequence[int]) -> tuple[Setting, ...]:
    """Return the setting for each number of ranks: whole nodes, or a part of one. Raises BadInput for any other number,
    and for a cluster of several kinds of nodes."""
    per_node = require_uniform(cluster, "--sizes").ranks_per_node
    settings: list[Setting] = []
    for size in sizes:
        if size < 1 or (size > per_node and size % per_node):
            below, above = size // per_node * per_node, -(-size // per_node) * per_node
            hint = f"use {below} or {above}" if size > per_node else "use 1 or more"
            raise BadInput(f"--sizes {size} is not a number of whole nodes of {per_node} ranks; {hint}.")
        nodes, ranks = (size // per_node, per_node) if size >= per_node else (1, size)
        settings.append({"cluster.nodes": nodes, "cluster.ranks_per_node": ranks})
    return tuple(settings)
