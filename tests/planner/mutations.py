"""Documents in which one thing has been changed: a number, a name, or the members of a list."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

Path: TypeAlias = tuple[str | int, ...]

_FACTORS = (0.0, -1.0, 0.5, 0.999, 1.001, 2.0, 1e3, 1e9, 1e300)


class Mutation(NamedTuple):
    """What was done to the value at a path, and the document after it."""

    path: Path
    told: str
    document: Any

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.path))}: {self.told}"


def mutate(draw: random.Random, document: Any, names: Sequence[str]) -> Mutation:
    """One change: of a number by a factor or by 1, of a name to one of `names`, of a list or a mapping by a member that
    goes or comes twice."""
    path, value = draw.choice(list(_values(document)))
    changed = copy.deepcopy(document)
    inside = changed
    for key in path[:-1]:
        inside = inside[key]
    key = path[-1]
    is_member = draw.random() < 0.2
    if is_member and isinstance(inside, list):
        return Mutation(path, _with_other_members(draw, inside, int(key)), changed)
    if is_member:
        del inside[key]
        return Mutation(path, "deleted", changed)
    inside[key] = _other(draw, value, names)
    return Mutation(path, f"{value!r} -> {inside[key]!r}", changed)


def _with_other_members(draw: random.Random, members: list[Any], index: int) -> str:
    if draw.random() < 0.5:
        del members[index]
        return "deleted"
    members.insert(index, copy.deepcopy(members[index]))
    return "twice"


def _other(draw: random.Random, value: Any, names: Sequence[str]) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        steps = [value + 1, value - 1, *(value * factor for factor in _FACTORS)]
        kind = type(value)
        others = [kind(step) for step in steps if math.isfinite(step)]
        return draw.choice([step for step in others if step != value])
    if value is None:
        return draw.choice([0, 1.5, "none"])
    return draw.choice([name for name in (*names, value + "x", "") if name != value])


def _values(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every number, name and truth in a document, each with where it stands."""
    if isinstance(node, dict | list):
        for key, member in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _values(member, (*path, key))
    else:
        yield path, node
