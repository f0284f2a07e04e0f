"""Strict, frozen documents: read with errors that name the path, written with canonical bytes.

Reading goes through JSON, also for YAML, so that a list may become a tuple while a string may not become a number.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from meshwright.profiles.errors import BadInput, RunFailed, is_full, suggestion
from meshwright.profiles.printable import has_hidden
from meshwright.profiles.values import MOST_JSON_BYTES, MOST_YAML_BYTES, json_value, yaml_value
from meshwright.profiles.values import read_text as read_text  # noqa: PLC0414 - told on


class Document(BaseModel):
    """A frozen tree of plain values; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields replaced. What was derived from the old fields is forgotten, not copied."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(copied).model_fields.keys():
            del copied.__dict__[name]
        return copied


def without(written: Mapping[str, Any], default: Any, *names: str) -> dict[str, Any]:
    """What is written but for the fields of these names, any when none is given, that have the default."""
    return {key: value for key, value in written.items() if value != default or (names and key not in names)}


D = TypeVar("D", bound=Document)

_LONGEST_NAME = 40
"""Characters of a file's name that a partial one beside it has as well."""


def read_yaml(kind: type[D], path: Path, what: str) -> D:
    """The document in a YAML file. Raises BadInput for text that is not YAML or not this document."""
    return parse_yaml(kind, read_text(path, what, MOST_YAML_BYTES), f"{what} {path}")


def read_json(kind: type[D], path: Path, what: str) -> D:
    """The document in a JSON file. Raises BadInput for text that is not JSON or not this document."""
    text = read_text(path, what, MOST_JSON_BYTES)
    json_value(text, f"{what} {path}")
    return parse(kind, text, f"{what} {path}")


def parse(kind: type[D], text: str, what: str) -> D:
    """The document in a JSON text. Raises BadInput with one sentence for the first thing that is wrong."""
    _require_visible(text, what)
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise BadInput(f"{what}: {_sentence(error, kind)}") from None


def parse_yaml(kind: type[D], text: str, what: str) -> D:
    """The document in a YAML text. Raises BadInput as `parse`.

    Scalars are those of YAML 1.2, where `no` is a text; yes, no, on and off are booleans where the document has one.
    """
    value = yaml_value(text, what)
    _require_visible(json.dumps(value), what)
    try:
        return kind.model_validate_json(json.dumps(value))
    except ValidationError as error:
        _say_booleans(value, error)
    return parse(kind, json.dumps(value), what)


def _require_visible(text: str, what: str) -> None:
    """Raises BadInput for a JSON text of which a name, or any other text in it, would command a terminal."""
    if not (_ESCAPED.search(text) or has_hidden(text)):
        return
    values: list[Any] = [json.loads(text)]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            values += value
        elif isinstance(value, str) and has_hidden(value):
            raise BadInput(f"{what}: {_short(value)} has a character that a terminal does not show; remove it.")


_ESCAPED = re.compile(r"\\(?:u00[0189]|u061|u20[026]|b|f|r)", re.IGNORECASE)
"""How a JSON text writes such characters, and some others."""

_BOOLEANS = {"yes": True, "on": True, "no": False, "off": False}


def _say_booleans(value: Any, error: ValidationError) -> None:
    """Puts booleans in the place of the words for them, where a boolean was asked."""
    for one in error.errors():
        word = str(one["input"]).lower()
        if one["type"] != "bool_type" or word not in _BOOLEANS:
            continue
        holder = value
        *path, last = one["loc"]
        for part in path:  # which also names members of unions
            if isinstance(holder, dict | list) and part in (holder if isinstance(holder, dict) else range(len(holder))):
                holder = holder[part]  # type: ignore[index]
        if isinstance(holder, dict | list) and _is_at(holder, last, one["input"]):
            holder[last] = _BOOLEANS[word]  # type: ignore[index]


def _is_at(holder: dict[Any, Any] | list[Any], key: Any, value: Any) -> bool:
    found = holder.get(key) if isinstance(holder, dict) else dict(enumerate(holder)).get(key)
    return found is value or found == value


def canonical_json(document: BaseModel) -> str:
    """The one text of a document: sorted keys, two-space indent, a newline at the end."""
    return json.dumps(document.model_dump(mode="json"), sort_keys=True, indent=2, allow_nan=False) + "\n"


def digest(document: BaseModel) -> str:
    """SHA-256 of the canonical text."""
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """As `write_bytes_atomically`, a text."""
    write_bytes_atomically(path, text.encode())


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Writes beside the target, has the disk take it and renames, so that nobody ever sees half a file; a link stays
    one.

    Leaves the target as it was and raises BadInput for one that is no file or may not be written, and RunFailed for a
    disk that takes no more.
    """
    _replace(path, content, waits_for_disk=True)


def write_newest(path: Path, text: str) -> None:
    """As `write_atomically`, for what is soon written again: it does not wait for the disk, so that a machine that
    fails may leave nothing of it."""
    _replace(path, text.encode(), waits_for_disk=False)


def _replace(path: Path, content: bytes, *, waits_for_disk: bool) -> None:
    try:
        target = path.resolve()
        if target.exists() and not target.is_file():
            raise BadInput(f"{path} is no file and is not replaced; name a file.")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name[:_LONGEST_NAME]}.{os.getpid()}.partial")
        if waits_for_disk:
            remove_partials(target.parent, target.name)
        try:
            with partial.open("wb") as file:
                file.write(content)
                if waits_for_disk:
                    file.flush()
                    os.fsync(file.fileno())
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        kind = RunFailed if is_full(error) else BadInput
        raise kind(f"{path} cannot be written: {error.strerror}; make room there or name another file.") from None


def remove_partials(directory: Path, name: str | None = None, *, least_seconds: float = 60.0) -> None:
    """Removes what processes have left beside a file of this name, or of any, that were killed while they wrote it: the
    part of a process which is not there any more, on this machine, and which was not written to for so long."""
    names = glob.escape(name[:_LONGEST_NAME]) if name else "*"
    for left in directory.glob(f".{names}.*.partial"):
        process = left.name.removesuffix(".partial").rpartition(".")[2]
        try:
            is_old = time.time() - left.stat().st_mtime >= least_seconds
            if is_old and process.isdigit() and not Path(f"/proc/{process}").exists():
                left.unlink()
        except OSError:  # another process has removed it, or may
            continue


def _sentence(error: ValidationError, kind: type[BaseModel]) -> str:
    first = min(_meant(error.errors()), key=lambda e: e["type"] != "extra_forbidden")
    location = [part for part in first["loc"] if not str(part).startswith(("function-", "lax-or-strict"))]
    path = ".".join(str(part) for part in location if not _is_member(part)) or "the document"
    if first["type"] == "extra_forbidden":
        known = _fields_at(kind, location[:-1])
        hint = suggestion(str(location[-1]), known) if known else "remove it."
        return f"unknown key {path!r}; {hint}"
    if first["type"] == "missing":
        return f"missing key {path!r}; add it."
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    if first["type"] == "value_error":
        return f"{path}: {message}." if location else f"{message}."
    return f"{path} is {_short(first['input'])}: {message[0].lower()}{message[1:]}."


def _meant(errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """The errors without those of the forms that a value plainly does not have, where another form came further."""
    return [e for e in errors if not any(_came_further(other, e) for other in errors)]


def _came_further(one: ErrorDetails, other: ErrorDetails) -> bool:
    """Whether one error lies inside a value that the other one refuses as a whole, as a member of the same union, or
    is a rule that the whole value breaks as a member which it could be."""
    where = other["loc"][:-1]
    refused = bool(where) and (other["type"] == "literal_error" or other["type"].endswith("_type"))
    deeper = len(one["loc"]) > len(other["loc"]) or (one["type"] == "value_error" and len(one["loc"]) > len(where))
    return refused and deeper and one["loc"][: len(where)] == where


def _is_member(part: int | str) -> bool:
    """Whether a part of a location is pydantic's name of a class or a literal of a union, and no key."""
    return isinstance(part, str) and (part[:1].isupper() or part.startswith("literal["))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _fields_at(kind: Any, location: list[Any]) -> tuple[str, ...]:
    """Names of the fields that are legal at a location inside a document class."""
    for depth, part in enumerate(location):
        for candidate in map(_bare, (kind, *get_args(kind))):
            if _is_record(candidate) and part in _annotations(candidate):
                return _fields_at(_annotations(candidate)[part], location[depth + 1 :])
            if _is_record(candidate) and part == candidate.__name__:  # pydantic names the member of a union
                return _fields_at(candidate, location[depth + 1 :])
        arguments = get_args(kind)
        if not arguments or not (isinstance(part, int) or get_origin(kind) is dict):
            return ()
        kind = arguments[0] if isinstance(part, int) else arguments[-1]
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return tuple(name for member in map(_bare, members) if _is_record(member) for name in _annotations(member))


def _bare(kind: Any) -> Any:
    """The type itself, without what pydantic is told of it beside."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and (issubclass(kind, BaseModel) or is_dataclass(kind))


def _annotations(record: Any) -> dict[str, Any]:
    if issubclass(record, BaseModel):
        return {name: field.annotation for name, field in record.model_fields.items()}
    return dict(get_type_hints(record))
