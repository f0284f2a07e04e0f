"""Plain values from YAML and JSON texts that anybody may have written: in limits, each key once, every number finite.

A text that is refused gets one sentence. None takes much memory or time, however it is made: a FIFO, a device, a bomb
of aliases and endless nesting are among them.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import yaml

from meshwright.profiles.errors import BadInput

_MIB = 2**20
MOST_YAML_BYTES = _MIB // 4
"""A job has a few thousand; reading so many takes seconds."""

MOST_JSON_BYTES = 64 * _MIB
"""A table has some millions."""

_MOST_BYTES = 1024 * _MIB
"""Of any other text, such as prompts."""

_DEEPEST = 32
"""Levels of a document; one that holds itself has no end."""

_MOST_VALUES, _MOST_CHARACTERS = 100_000, 16 * _MIB
"""Of a YAML document whose aliases are written out."""

_MOST_MERGED = 100
"""Keys of a mapping after those that `<<` brings."""

_DIGITS = re.compile(r"[0-9]{1,18}")
"""Other alphabets have digits too, and what has thousands of them is no number that Python reads."""

_LONGEST_NAME = 255
"""Bytes of a file's name, on the file systems of Linux."""

_PLAIN = str | int | float | None


def whole_number(text: str) -> int | None:
    """What up to 18 plain digits say; None for any other text."""
    return int(text) if _DIGITS.fullmatch(text) else None


def is_file_name(value: object) -> bool:
    """Whether a value is a name that a file may have in the directory where it was read: no path, and not too long."""
    if not isinstance(value, str) or not value or "\0" in value or Path(value).name != value:
        return False
    return len(value.encode(errors="surrogatepass")) <= _LONGEST_NAME


def read_text(path: Path, what: str, most_bytes: int = _MOST_BYTES) -> str:
    """The text of the file; raises BadInput naming `what` when it is missing, unreadable, no file or too large."""
    require_file(path, what, most_bytes)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{what} {path} cannot be read: {error}.") from None


def require_file(path: Path, what: str, most_bytes: int) -> None:
    """Raises BadInput naming `what` for what is no file, or is larger than that."""
    try:
        found = path.stat()
    except FileNotFoundError:
        raise BadInput(f"{what} {path} does not exist; check the path.") from None
    except OSError as error:
        raise BadInput(f"{what} {path} cannot be read: {error.strerror}; check the path.") from None
    if not stat.S_ISREG(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "a device or a pipe"
        raise BadInput(f"{what} {path} cannot be read: it is {kind}; name a file.")
    if found.st_size > most_bytes:
        size, most = (f"{num_bytes / _MIB:.4g} MiB" for num_bytes in (found.st_size, most_bytes))
        raise BadInput(f"{what} {path} has {size}, and {most} is the most that is read; name another file.")


def load_json(text: str) -> Any:
    """What a JSON text says that others have written, such as a line of a file. Raises DoubledKeyError for an object
    with a key twice, and ValueError or RecursionError for a text that is not JSON."""
    return json.loads(text, object_pairs_hook=_once)


def json_value(text: str, told: str) -> Any:
    """What a JSON text says. Raises BadInput, beginning with `told`, for one that is not JSON."""
    try:
        return whole_characters(
            json.loads(text, object_pairs_hook=_once, parse_constant=_refuse, parse_float=_finite), text, told
        )
    except DoubledKeyError as error:
        line = _line_of_second(text)
        raise BadInput(f"{told}: the key {error.key!r} is given twice, again at line {line}; keep one.") from None
    except _NotFiniteError as error:
        line = _line_of_number(text, str(error))
        raise BadInput(f"{told}: {error} at line {line} is no finite number; write one.") from None
    except ValueError as error:
        raise BadInput(f"{told} is not JSON: {error}.") from None
    except RecursionError:
        raise BadInput(f"{told} is nested too deep; {_DEEPEST} levels are enough.") from None


_HALF = re.compile(r"\\(?:u|U0000)[dD][89a-fA-F]")
"""How escapes of UTF-16 surrogates begin, two of which are a character; one alone is in no text."""


def whole_characters(value: Any, text: str, told: str) -> Any:
    """The value of a JSON text. Raises BadInput where a string of it has half a character, which no file can hold."""
    try:
        if _HALF.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadInput(f"{told} has half a character, an escape from \\ud800 to \\udfff; write whole ones.") from None
    return value


class DoubledKeyError(ValueError):
    """A key that an object has twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r} is given twice; keep one")
        self.key = key


class _NotFiniteError(ValueError):
    """A number that is none, or too large for one."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise DoubledKeyError(next(key for key in keys if keys.count(key) > 1))
    return found


def _refuse(constant: str) -> NoReturn:
    raise _NotFiniteError(constant)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise _NotFiniteError(digits[:_DEEPEST])
    return number


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"(\s*:)?|[{}]')


def _line_of_second(text: str) -> int:
    """The line of the first key that its object has already; the text is JSON."""
    keys: list[set[str]] = []
    for token in _TOKEN.finditer(text):
        if token[0] == "{":
            keys.append(set())
        elif token[0] == "}":
            keys.pop()
        elif token[1] is not None:
            key = json.loads(token[0][: -len(token[1])])
            if key in keys[-1]:
                return text.count("\n", 0, token.start()) + 1
            keys[-1].add(key)
    raise AssertionError("no key is given twice")


def _line_of_number(text: str, number: str) -> int:
    """The line of the first such number that stands in no string; the text holds one."""
    for token in re.finditer(rf'"(?:[^"\\]|\\.)*"|{re.escape(number)}', text):
        if not token[0].startswith('"'):
            return text.count("\n", 0, token.start()) + 1
    raise AssertionError("the number is not there")


class _Loader(yaml.SafeLoader):
    """Safe YAML with the scalars of YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#103-core-schema): 25e9 is a
    number, and 1:20, 1_000, no and 2020-01-01 are texts. A mapping has a key once."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as the library declares it

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            name = (key.tag, str(key.value))
            if name in seen:
                problem = f"the key {key.value!r} is given twice; keep one"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(name)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MOST_MERGED:
            problem = f"more than {_MOST_MERGED} keys are merged into one mapping"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?(\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN", list("-+.")),
    ("merge", r"<<", ["<"]),  # of YAML 1.1, and used by many
)
"""What a plain scalar is, by the first of these that it is as a whole, and how it begins."""

for _kind, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"(?:{_pattern})$"), _first)


def _whole(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _whole)


_MANY_OPENED = re.compile(rf"(?:[\[{{]\s*){{{_DEEPEST + 1}}}")
"""Brackets one after the other: the library takes seconds over a thousand of them."""


def yaml_value(text: str, told: str) -> Any:
    """What a YAML text says, as values that JSON has. Raises BadInput, beginning with `told`, for any other."""
    if _MANY_OPENED.search(text):
        raise BadInput(f"{told} is nested too deep; {_DEEPEST} levels are enough.")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise BadInput(f"{told} is not YAML{where}: {problem}.") from None
    except RecursionError:
        raise BadInput(f"{told} is nested too deep; {_DEEPEST} levels are enough.") from None
    except ValueError as error:  # of a date that is none
        raise BadInput(f"{told} is not YAML: {error}.") from None
    characters = 0
    for count, (where, member) in enumerate(_members(value)):
        if not isinstance(member, _PLAIN | dict | list) or (isinstance(member, float) and not math.isfinite(member)):
            raise BadInput(f"{told}: {where} is {member}, which is no text and no finite number; write one of these.")
        characters += len(member) if isinstance(member, str) else 1
        if count > _MOST_VALUES or characters > _MOST_CHARACTERS:
            raise BadInput(f"{told} has more than {_MOST_VALUES} values when its aliases are written out; write fewer.")
    return whole_characters(value, text, told)


def _members(value: Any, *keys: str) -> Iterator[tuple[str, Any]]:
    """Every value in a tree, with where it stands; a key is told when it is no plain one, nesting when it goes on."""
    where = ".".join(keys) or "the document"
    yield where, value
    if not isinstance(value, dict | list):
        return
    if len(keys) == _DEEPEST:
        yield f"{where[:20]}...", _Endless()
    for key, member in value.items() if isinstance(value, dict) else enumerate(value):
        if not isinstance(key, _PLAIN):
            yield f"a key of {where}", key
        yield from _members(member, *keys, str(key))


class _Endless:
    def __str__(self) -> str:
        return "nested too deep"
