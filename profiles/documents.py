"""Strict, frozen documents: parsed with errors that name the path, written as canonical JSON, and compared key by key.

YAML is converted to JSON before validation, so that a list may become a tuple but a string may not become a number.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    NamedTuple,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from meshwright.profiles.errors import BadInput, RunFailed, is_disk_failure, one_of, suggestion
from meshwright.profiles.untrusted_text import (
    MAX_JSON_BYTES,
    MAX_YAML_BYTES,
    has_control_characters,
    json_value,
    limited,
    read_text,
    yaml_value,
)


class Document(BaseModel):
    """A frozen tree of plain values; unknown keys are errors.

    The validator of a document is built when it is first used: a command uses about a third of all documents.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)

    deciding_keys: ClassVar[tuple[str, ...]] = ()
    """Top-level keys that decide which other keys a document has. An error in one of them is reported first, before any
    unknown key."""

    @classmethod
    def explain_unknown_key(cls, _key: str, /) -> str | None:
        """Return the end of a sentence on a key that this document does not have; None if it may be misspelt."""
        return None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields replaced. Cached properties are not copied."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(copied).model_fields.keys():
            del copied.__dict__[name]
        return copied


SCHEMA_VERSION: Final = 3
"""The one version of all documents that the program writes for itself; a document of another version is refused."""


class VersionedDocument(Document):
    """A document that the program writes for itself. One of another version is refused before its keys are read."""

    remedy: ClassVar[str]
    """Clause that says what to do about a document of another version."""

    schema_version: Literal[3] = SCHEMA_VERSION


def require_version(value: Any, what: str, remedy: str) -> None:
    """Raises BadInput unless a mapping has the schema version of this program."""
    version = value.get("schema_version") if isinstance(value, Mapping) else None
    if version != SCHEMA_VERSION:
        if version is None:
            raise BadInput(f"{what} has no schema_version, and this program reads {SCHEMA_VERSION}; {remedy}.")
        raise BadInput(f"{what}: schema_version={version!r} is not the {SCHEMA_VERSION} this program reads; {remedy}.")


D = TypeVar("D", bound=Document)

_NAME_PREFIX_LENGTH = 40
"""Characters of a file's name that are part of the name of its temporary file."""


def read_yaml(kind: type[D], path: Path, what: str) -> D:
    """Read a document from a YAML file. Raises BadInput for invalid YAML or an invalid document."""
    text = read_text(path, what, MAX_YAML_BYTES)
    if path.suffix == ".json":
        _require_kind(json_value(text, f"{what} {path}"), what, path)
    return parse_yaml(kind, text, f"{what} {path}")


def read_json(kind: type[D], path: Path, what: str) -> D:
    """Read a document from a JSON file. Raises BadInput for invalid JSON, another version or an invalid document."""
    text = read_text(path, what, MAX_JSON_BYTES)
    if path.suffix in (".yaml", ".yml"):
        raise BadInput(f"{path} is YAML, as a job is, and a {what} is JSON; give the {what} that was written for it.")
    value = json_value(text, f"{what} {path}")
    _require_kind(value, what, path)
    if issubclass(kind, VersionedDocument):
        require_version(value, f"{what} {path}", kind.remedy)
    return parse(kind, text, f"{what} {path}")


_KINDS = {
    "plan": {"placements", "pools", "solver"},
    "table": {"collectives", "measurements", "provenance"},
    "proof": {"bound_seconds", "trees"},
}
"""Keys by which a document that was given in the place of another is recognised."""


def _require_kind(value: Any, what: str, path: Path) -> None:
    """Raises BadInput for a mapping with the keys of another kind of document than `what`."""
    for name, keys in _KINDS.items():
        if name != what and isinstance(value, dict) and keys <= value.keys():
            raise BadInput(f"{path} is a {name}, and a {what} is needed here; give the {what}.")


def parse(kind: type[D], text: str, what: str) -> D:
    """Parse a document from a JSON text. Raises BadInput with one sentence for the first error."""
    _require_visible(text, what)
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise BadInput(f"{what}: {_sentence(error, kind)}") from None


def build(kind: type[D], what: str, **fields: Any) -> D:
    """Make a document of fields that are parsed already.

    Raises BadInput, whose message begins with `what`, for the first rule of several fields that is broken.
    """
    try:
        return kind(**fields)
    except ValidationError as error:
        raise BadInput(f"{what}: {_sentence(error, kind)}") from None


def parse_yaml(kind: type[D], text: str, what: str) -> D:
    """Parse a document from a YAML text. Raises BadInput like `parse`.

    Scalars follow YAML 1.2, where `no` is a string; yes, no, on and off are accepted where the document has a boolean.
    """
    value = yaml_value(text, what)
    _require_visible(json.dumps(value), what)
    try:
        return kind.model_validate_json(json.dumps(value))
    except ValidationError as error:
        _replace_boolean_words(value, error)
    return parse(kind, json.dumps(value), what)


def _require_visible(text: str, what: str) -> None:
    """Raises BadInput for a JSON text in which a key or a string has control characters."""
    if not (_ESCAPED.search(text) or has_control_characters(text)):
        return
    values: list[Any] = [json.loads(text)]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            values += value
        elif isinstance(value, str) and has_control_characters(value):
            raise BadInput(f"{what}: {_short(value)} has a character that a terminal does not show; remove it.")


_ESCAPED = re.compile(r"\\(?:u00[0189]|u061|u20[026]|b|f|r)", re.IGNORECASE)
"""JSON escapes of control characters, and of a few others."""

_BOOLEANS = {"yes": True, "on": True, "no": False, "off": False}


def _replace_boolean_words(value: Any, error: ValidationError) -> None:
    """Replace the words for booleans by booleans wherever validation expected one."""
    for detail in error.errors():
        word = str(detail["input"]).lower()
        if detail["type"] != "bool_type" or word not in _BOOLEANS:
            continue
        holder = value
        *path, last = detail["loc"]
        for part in path:  # union members are part of the location too
            if isinstance(holder, dict | list) and part in (holder if isinstance(holder, dict) else range(len(holder))):
                holder = holder[part]  # type: ignore[index]
        if isinstance(holder, dict | list) and _is_at(holder, last, detail["input"]):
            holder[last] = _BOOLEANS[word]  # type: ignore[index]


def _is_at(holder: dict[Any, Any] | list[Any], key: Any, value: Any) -> bool:
    current = holder.get(key) if isinstance(holder, dict) else dict(enumerate(holder)).get(key)
    return current is value or current == value


def canonical_json(document: BaseModel) -> str:
    """Return the canonical text of a document: sorted keys, two-space indent, a newline at the end.

    Every field is written, defaults included, so that other programs need no table of defaults; a field that is None is
    absent and is not written.
    """
    written = document.model_dump(mode="json", exclude_none=True)
    return json.dumps(written, sort_keys=True, indent=2, allow_nan=False) + "\n"


def digest(document: BaseModel) -> str:
    """Return the SHA-256 of the canonical text, in hexadecimal."""
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Write a text as `write_bytes_atomically` does."""
    write_bytes_atomically(path, text.encode())


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Write a temporary file beside the target, fsync and rename it; if the path is a symbolic link, it remains a link.

    Readers never see a partial file. On error the target is unchanged: raises BadInput if it is not a file or is not
    writable, and RunFailed if the disk is full or has failed.
    """
    _replace(path, content, waits_for_disk=True)


def write_without_fsync(path: Path, text: str) -> None:
    """Write a text like `write_atomically` but without fsync, for files that are rewritten often.

    If the machine crashes, the content may be lost.
    """
    _replace(path, text.encode(), waits_for_disk=False)


def _replace(path: Path, content: bytes, *, waits_for_disk: bool) -> None:
    try:
        target = path.resolve()
        if target.exists() and not target.is_file():
            raise BadInput(f"{path} is no file and is not replaced; name a file.")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name[:_NAME_PREFIX_LENGTH]}.{os.getpid()}.partial")
        if waits_for_disk:
            remove_temporary_files(target.parent, target.name)
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
        kind = RunFailed if is_disk_failure(error) else BadInput
        raise kind(f"{path} cannot be written: {error.strerror}; make room there or name another file.") from None


def remove_temporary_files(directory: Path, name: str | None = None, *, min_age_seconds: float = 60.0) -> None:
    """Remove temporary files that killed processes left beside the named file, or beside any file.

    A temporary file is removed if its process no longer exists on this machine and it is older than `min_age_seconds`.
    """
    names = glob.escape(name[:_NAME_PREFIX_LENGTH]) if name else "*"
    for partial in directory.glob(f".{names}.*.partial"):
        process = partial.name.removesuffix(".partial").rpartition(".")[2]
        try:
            is_old = time.time() - partial.stat().st_mtime >= min_age_seconds
            if is_old and process.isdigit() and not Path(f"/proc/{process}").exists():
                partial.unlink()
        except OSError:  # another process may have removed it
            continue


def _sentence(error: ValidationError, kind: type[BaseModel]) -> str:
    deciding = kind.deciding_keys if issubclass(kind, Document) else ()

    def order(one: ErrorDetails) -> tuple[bool, bool]:
        return not set(_keys(one["loc"])[:1]) & set(deciding), one["type"] != "extra_forbidden"

    first = min(_relevant_errors(error.errors()), key=order)
    location = [part for part in first["loc"] if not str(part).startswith(("function-", "lax-or-strict"))]
    keys = _keys(location)
    path = ".".join(keys) or "the document"
    if first["type"] == "extra_forbidden":
        path = ".".join([*_keys(location[:-1]), str(location[-1])])  # a key may look like the name of a union member
        return f"unknown key {path!r}; {_hint(_records_at(kind, location[:-1]), str(location[-1]))}"
    if first["type"] == "missing":
        return f"missing key {path!r}; add it."
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    if first["type"] == "too_short":
        number = first["ctx"]["min_length"]
        message = f"give at least {number} {'item' if number == 1 else 'items'}"
    if location[-1:] == ["[key]"]:
        rule = message.removeprefix("String ")
        return f"{'.'.join(_keys(location[:-2]))}: the name {_short(first['input'])} {rule}; give another name."
    if first["type"] == "literal_error":
        message = f"input should be {one_of(_literals(error, keys))}"
    if first["type"] == "value_error":
        return f"{path}: {message}." if keys else f"{message}."
    is_text = location[-1:] == ["str"]  # pydantic's name of a union member: text, or an object
    records = _records_at(kind, location[: -1 if is_text else None])
    if (is_text or first["type"] in _RECORD_TYPES) and (names := _keys_of(records)):
        return _sentence_on_plain_value(first["input"], keys[: -1 if is_text else None], records, names, is_text)
    return f"{path} is {_short(first['input'])}: {message[0].lower()}{message[1:]}."


def _sentence_on_plain_value(
    value: Any, keys: Sequence[str], records: Sequence[Any], names: Sequence[str], is_text: bool
) -> str:
    """The sentence on a value that should have the keys `names` of one of `records`, or may also be a text."""
    shown = "empty" if value is None and not keys else _short(value)
    needed = next(filter(None, map(_first_required_key, records)), names[0])
    wanted = "text, or an object" if is_text else "an object"
    path = ".".join(keys) or "the document"
    return f"{path} is {shown} and should be {wanted} with keys ({_listed(names)}); give {needed}."


def _literals(error: ValidationError, keys: Sequence[str]) -> list[str]:
    """The values that all members of a union allow at these keys."""
    at_keys = [one for one in error.errors() if one["type"] == "literal_error" and _keys(one["loc"]) == keys]
    listed = (one["ctx"]["expected"].replace(" or ", ", ").split(", ") for one in at_keys)
    return list(dict.fromkeys(name for names in listed for name in names))


def _keys(location: Iterable[int | str]) -> list[str]:
    """The keys of a location in a document, without pydantic's names for parts of its schema."""
    names = (str(part) for part in location if not _is_union_member(part))
    return [name for name in names if not name.startswith(("function-", "lax-or-strict"))]


def _relevant_errors(errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """The errors, without those of union members that the value was clearly not meant to be.

    A member that rejects a whole value is left out where another member rejects only a field in it: the value was then
    meant to be that other one. An error of a validator of the whole value counts as one in a field too.
    """
    deepest: dict[tuple[int | str, ...], int] = {}  # by the location of a value: how far down in it an error lies
    for error in errors:
        location, depth = error["loc"], len(error["loc"]) + (error["type"] == "value_error")
        for length in range(1, len(location) + 1):
            deepest[location[:length]] = max(deepest.get(location[:length], 0), depth)
    return [e for e in errors if not _rejects_a_whole_value(e) or deepest.get(e["loc"][:-1], 0) <= len(e["loc"])]


def _rejects_a_whole_value(error: ErrorDetails) -> bool:
    """True if a member of a union is not of the value's type, or of another kind than its discriminating key says."""
    return error["type"] == "literal_error" or error["type"].endswith("_type")


def _is_union_member(part: int | str) -> bool:
    """True if a part of a location is pydantic's name of a union member and not a key."""
    return isinstance(part, str) and (part[:1].isupper() or part.startswith("literal["))


def _short(value: Any) -> str:
    return limited(repr(value))


_RECORD_TYPES = ("model_type", "model_attributes_type", "dataclass_type")
"""Errors of a plain value where a document has keys."""

_MAX_LISTED_KEYS = 8
"""Keys of a document that a message about a plain value lists."""


def _keys_of(records: Sequence[Any]) -> tuple[str, ...]:
    """The keys of a value that may be one of these records, without duplicates."""
    return tuple(dict.fromkeys(name for record in records for name in _annotations(record)))


def _listed(names: Sequence[str]) -> str:
    """The first of these keys."""
    return ", ".join(names[:_MAX_LISTED_KEYS]) + (", ..." if len(names) > _MAX_LISTED_KEYS else "")


def _first_required_key(record: Any) -> str | None:
    """The first key of a document class without a default; None for one that has none, and for a dataclass."""
    fields = record.model_fields if issubclass(record, BaseModel) else {}
    return next((name for name, field in fields.items() if field.is_required()), None)


def _hint(records: Sequence[Any], key: str) -> str:
    """The end of a sentence on a key that none of these records has."""
    for record in records:
        if issubclass(record, Document) and (explanation := record.explain_unknown_key(key)):
            return str(explanation)
    known = _keys_of(records)
    return suggestion(key, known) if known else "remove it."


def _records_at(kind: Any, location: list[Any]) -> tuple[Any, ...]:
    """The document classes and dataclasses whose keys are valid at a location inside a document class."""
    for depth, part in enumerate(location):
        for candidate in map(_without_annotation, (kind, *get_args(kind))):
            if _is_record(candidate) and part in _annotations(candidate):
                return _records_at(_annotations(candidate)[part], location[depth + 1 :])
            for member in (candidate, *candidate.__subclasses__()) if _is_record(candidate) else ():
                if part == member.__name__:  # pydantic's name of a union member
                    return _records_at(member, location[depth + 1 :])
        arguments = get_args(kind)
        if not arguments or not (isinstance(part, int) or get_origin(kind) in (dict, Mapping)):
            return ()
        kind = arguments[0] if isinstance(part, int) else arguments[-1]
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return tuple(member for member in map(_without_annotation, members) if _is_record(member))


def _without_annotation(kind: Any) -> Any:
    """The type without its `Annotated` metadata."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and (issubclass(kind, BaseModel) or is_dataclass(kind))


def _annotations(record: Any) -> dict[str, Any]:
    if issubclass(record, BaseModel):
        return {name: field.annotation for name, field in record.model_fields.items()}
    return dict(get_type_hints(record))


class Difference(NamedTuple):
    """A dotted key and its values in both documents; None if a document lacks the key."""

    key: str
    one: Any
    other: Any

    def describe(self, one: str, other: str) -> str:
        """Return a clause that states the difference, with the names of both documents."""
        return f"{self.key} is {_limited_repr(self.one)} in {one} and {_limited_repr(self.other)} in {other}"


def differences(one: BaseModel, other: BaseModel) -> tuple[Difference, ...]:
    """Return all leaves in which the documents differ, in key order. A list is one leaf."""
    return tuple(_differences(one.model_dump(mode="json"), other.model_dump(mode="json")))


def _differences(one: Any, other: Any, *keys: str) -> Iterator[Difference]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            yield from _differences(one.get(key), other.get(key), *keys, key)
    elif one != other:
        yield Difference(".".join(keys), one, other)


def _limited_repr(value: Any) -> str:
    return "not given" if value is None else limited(repr(value), 40)
