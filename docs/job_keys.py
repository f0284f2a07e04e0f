"""Writes the page of all keys of a job from the job's schema:

python docs/job_keys.py > docs/job.md
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from meshwright.planner.job.algorithm_settings import LearningSettings
from meshwright.planner.job.job import JOB_KINDS, SETTINGS_KEYS, Job

_TITLE = """# The job file

All keys of `job.yaml`, with their types, defaults and meanings.

- `meshwright init` writes a first job with comments. The jobs in `examples/` can be planned as they are.
- An unknown key is refused; the message names the nearest known key.
- Durations are in seconds, memory in bytes, lengths in tokens. Paths are relative to the job file.

`python docs/job_keys.py` generates this page from the schema. A test compares the two.
"""
_LEARNING = "settings of every algorithm"
_PLAIN = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "nothing"}


def main() -> None:
    sys.stdout.write(page())


def page() -> str:
    """Markdown."""
    return "\n".join((_TITLE, *_sections()))


def _sections() -> Iterator[str]:
    """The job's own keys, then the keys of each type of group, in the order in which they first occur."""
    waiting: list[tuple[str, type[BaseModel]]] = [("", Job)]
    known: set[type[BaseModel]] = {Job}
    has_learning = False
    while waiting:
        path, model = waiting.pop(0)
        is_learning = path in SETTINGS_KEYS.values()
        if is_learning and not has_learning:
            has_learning = True
            yield _section(_LEARNING, LearningSettings, LearningSettings.model_fields)
            waiting[:0] = _groups("ppo", LearningSettings, known)
        shared = LearningSettings.model_fields if is_learning else {}
        own = {name: field for name, field in _fields(model).items() if name not in shared}
        yield _section(path, model, own)
        waiting[:0] = _groups(path, model, known)


def _groups(path: str, model: type[BaseModel], known: set[type[BaseModel]]) -> list[tuple[str, type[BaseModel]]]:
    """Nested groups of keys with their paths, without those in `known`."""
    found = []
    for name, field in _fields(model).items():
        for group in _models_in(field.annotation):
            if group not in known:
                known.add(group)
                found.append((f"{path}.{name}" if path else name, group))
    return found


def _fields(model: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """The fields of a model; those of a job, and then the settings of each algorithm."""
    fields = dict(model.model_fields)
    for kind in JOB_KINDS if model is Job else ():
        fields = {**fields, **kind.model_fields, **model.model_fields}
    return fields


def _section(path: str, model: type[BaseModel], fields: Mapping[str, FieldInfo]) -> str:
    title = f"## `{path}`" if path and path != _LEARNING else f"## {path.capitalize() or 'The job'}"
    lines = [title, ""]
    if path in SETTINGS_KEYS.values():
        lines += [f"In addition to the [{_LEARNING}](job.md#{_LEARNING.replace(' ', '-')}).", ""]
    elif path and model.__doc__:
        lines += [" ".join(model.__doc__.split("\n\n")[0].split()), ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    lines += [_row(name, field) for name, field in fields.items()]
    return "\n".join((*lines, ""))


def _row(name: str, field: FieldInfo) -> str:
    default = "**required**" if field.is_required() else _default_text(field.get_default(call_default_factory=True))
    kind = _kind(field.annotation, _limits(field.metadata))
    return f"| `{name}` | {kind} | {default} | {(field.description or '').replace('|', '/')} |"


def _default_text(default: Any) -> str:
    if default is None:
        return "none"
    if isinstance(default, BaseModel):
        return "its own defaults"
    if default in ((), {}):
        return "none"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _kind(annotation: Any, limits: str = "") -> str:
    """A type in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0], limits or _limits(arguments[1:]))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        kinds = [_kind(one, limits) for one in arguments if one is not type(None)]
        return " or ".join(dict.fromkeys(kinds))
    if origin is not None:
        kinds = [_kind(one) for one in arguments if one is not Ellipsis]
        return f"mapping of {' to '.join(kinds)}" if issubclass(origin, Mapping) else f"list of {' and '.join(kinds)}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "keys"
    return f"{_PLAIN.get(annotation, 'text')}{limits}"


def _limits(metadata: Sequence[Any]) -> str:
    signs = {annotated_types.Ge: ">=", annotated_types.Gt: ">", annotated_types.Le: "<=", annotated_types.Lt: "<"}
    found = [f"{sign} {next(iter(_bounds_of(one)))}" for one in metadata if (sign := signs.get(type(one)))]
    return f" {', '.join(found)}" if found else ""


def _bounds_of(limit: Any) -> Iterator[object]:
    """The value of a limit."""
    yield from (getattr(limit, name) for name in ("ge", "gt", "le", "lt") if hasattr(limit, name))


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for one in get_args(annotation):
        yield from _models_in(one)


if __name__ == "__main__":
    main()
