"""Reading untrusted YAML and JSON, and printing untrusted text to a terminal.

Size and depth are bounded, keys are unique, and numbers are finite; an invalid text is refused with one sentence. No
input takes much memory or time, whatever it is: a FIFO, a device, an alias bomb or endless nesting.
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
MAX_YAML_BYTES = _MIB // 4
"""Upper bound for a YAML file. A job has a few thousand bytes; reading this many takes seconds."""

MAX_JSON_BYTES = 64 * _MIB
"""Upper bound for a JSON file. A profile table has a few million bytes."""

_MAX_BYTES = 1024 * _MIB
"""Upper bound for any other text file, such as prompts."""

_MAX_DEPTH = 32
"""Maximum nesting depth of a document; an alias to an enclosing value would be endless."""

_MAX_VALUES, _MAX_CHARACTERS = 100_000, 16 * _MIB
"""Upper bounds for a YAML document with its aliases expanded."""

_MAX_MERGED_KEYS = 100
"""Maximum number of keys of a mapping after `<<` merges."""

_DIGITS = re.compile(r"[0-9]{1,18}")
"""ASCII digits only, and few of them: Python refuses integers with thousands of digits."""

_MAX_NAME_BYTES = 255
"""Maximum bytes of a file name on Linux file systems."""

_MAX_SHOWN_DIGITS = 32
"""Maximum number of characters of a number in an error message."""

_PLAIN = str | int | float | None


def whole_number(text: str) -> int | None:
    """Return the number that up to 18 ASCII digits represent; None for any other text."""
    return int(text) if _DIGITS.fullmatch(text) else None


def is_file_name(value: object) -> bool:
    """True if a value is a valid file name: no path separators, and not too long."""
    if not isinstance(value, str) or not value or "\0" in value or Path(value).name != value:
        return False
    return len(value.encode(errors="surrogatepass")) <= _MAX_NAME_BYTES


def read_text(path: Path, what: str, max_bytes: int = _MAX_BYTES) -> str:
    """Read a UTF-8 text file, without the byte order mark that it may begin with.

    Raises BadInput, naming `what`, if it is missing, unreadable, not a regular file or too large.
    """
    require_file(path, what, max_bytes)
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{what} {path} {not_utf8(error)}, or name another file.") from None
    except OSError as error:
        raise BadInput(f"{what} {path} cannot be read: {error.strerror}; check the path.") from None


def not_utf8(error: UnicodeDecodeError) -> str:
    """Return the part of a sentence that says where a text is not UTF-8, and what to do."""
    return f"is not UTF-8 text (byte {error.start + 1}); save it as UTF-8"


def require_file(path: Path, what: str, max_bytes: int) -> None:
    """Raises BadInput, naming `what`, if the path is not a regular file or is larger than `max_bytes`."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise BadInput(f"{what} {path} does not exist; check the path.") from None
    except OSError as error:
        raise BadInput(f"{what} {path} cannot be read: {error.strerror}; check the path.") from None
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a device or a pipe"
        raise BadInput(f"{what} {path} cannot be read: it is {kind}; name a file.")
    if status.st_size > max_bytes:
        size, limit = (f"{num_bytes / _MIB:.4g} MiB" for num_bytes in (status.st_size, max_bytes))
        raise BadInput(f"{what} {path} has {size}, and {limit} is the most that is read; name another file.")


def load_json(text: str) -> Any:
    """Parse untrusted JSON, such as a line of a file.

    Raises DuplicateKeyError for an object with a duplicate key, and ValueError or RecursionError for invalid JSON.
    """
    return json.loads(text, object_pairs_hook=_unique_keys)


def json_value(text: str, what: str) -> Any:
    """Parse a JSON text into plain values. Raises BadInput, whose message begins with `what`, for invalid JSON."""
    try:
        return require_no_surrogates(
            json.loads(
                text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite_float
            ),
            text,
            what,
        )
    except DuplicateKeyError as error:
        line = _line_of_duplicate_key(text)
        raise BadInput(f"{what}: the key {error.key!r} is given twice, again at line {line}; keep one.") from None
    except _NotFiniteError as error:
        line = _line_of_number(text, str(error))
        raise BadInput(f"{what}: {error} at line {line} is not a finite number; write one.") from None
    except ValueError as error:
        raise BadInput(f"{what} is not JSON: {error}; correct it there, or write the file anew.") from None
    except RecursionError:
        raise BadInput(f"{what} is nested too deep; use at most {_MAX_DEPTH} levels.") from None


_SURROGATE = re.compile(r"\\(?:u|U0000)[dD][89a-fA-F]")
"""The start of an escaped UTF-16 surrogate: two make a character, and a lone one cannot be encoded."""


def require_no_surrogates(value: Any, text: str, what: str) -> Any:
    """Return the value parsed from a text. Raises BadInput if a string in it has a lone surrogate."""
    try:
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadInput(
            f"{what} has a lone surrogate, an escape from \\ud800 to \\udfff; write whole characters."
        ) from None
    return value


class DuplicateKeyError(ValueError):
    """Error for a duplicate key in a JSON object."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r} is given twice; keep one")
        self.key = key


class _NotFiniteError(ValueError):
    """Error for a number that is not finite or overflows a float."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        keys = [key for key, _ in pairs]
        raise DuplicateKeyError(next(key for key in keys if keys.count(key) > 1))
    return unique


def _refuse_constant(constant: str) -> NoReturn:
    raise _NotFiniteError(constant)


def _finite_float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise _NotFiniteError(digits[:_MAX_SHOWN_DIGITS])
    return number


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"(\s*:)?|[{}]')
"""A JSON string, with the colon after it if it is a key, or a brace."""


def _line_of_duplicate_key(text: str) -> int:
    """Line of the first duplicate key; the text is valid JSON with one."""
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
    """Line of the first occurrence of a number outside strings; there must be one."""
    for token in re.finditer(rf'"(?:[^"\\]|\\.)*"|{re.escape(number)}', text):
        if not token[0].startswith('"'):
            return text.count("\n", 0, token.start()) + 1
    raise AssertionError("the number is not there")


class _Loader(yaml.SafeLoader):
    """Safe YAML with the scalars of YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#103-core-schema).

    25e9 is a number; 1:20, 1_000, no and 2020-01-01 are strings. Duplicate keys are an error.
    """

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
        if len(node.value) > _MAX_MERGED_KEYS:
            problem = f"more than {_MAX_MERGED_KEYS} keys are merged into one mapping"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?(\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN", list("-+.")),
    ("merge", r"<<", ["<"]),  # from YAML 1.1, and widely used
)
"""Types of plain scalars: (tag, pattern, first characters). The first pattern that matches a whole scalar decides."""

for _kind, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"(?:{_pattern})$"), _first)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


_DEEPLY_NESTED = re.compile(rf"(?:[\[{{]\s*){{{_MAX_DEPTH + 1}}}")
"""Too many consecutive opening brackets: PyYAML takes seconds for a thousand of them."""


def yaml_value(text: str, what: str) -> Any:
    """Parse a YAML text into values that JSON can hold. Raises BadInput, naming `what`, for any other text."""
    if _DEEPLY_NESTED.search(text):
        raise BadInput(f"{what} is nested too deep; use at most {_MAX_DEPTH} levels.")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        character = chr(error.character) if isinstance(error.character, int) else error.character
        raise BadInput(f"{what} has the character {character!r}, which YAML does not allow; remove it.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise BadInput(f"{what} is not YAML{where}: {problem}; correct it there.") from None
    except RecursionError:
        raise BadInput(f"{what} is nested too deep; use at most {_MAX_DEPTH} levels.") from None
    except ValueError as error:  # an invalid date, for example
        raise BadInput(f"{what} is not YAML: {error}; write another value.") from None
    characters = 0
    for count, (where, member) in enumerate(_members(value)):
        if not isinstance(member, _PLAIN | dict | list) or (isinstance(member, float) and not math.isfinite(member)):
            raise BadInput(
                f"{what}: {where} is {member}, which is neither text nor a finite number; write one of these."
            )
        characters += len(member) if isinstance(member, str) else 1
        if count > _MAX_VALUES or characters > _MAX_CHARACTERS:
            raise BadInput(f"{what} has more than {_MAX_VALUES} values when its aliases are written out; write fewer.")
    return require_no_surrogates(value, text, what)


def _members(value: Any, *keys: str) -> Iterator[tuple[str, Any]]:
    """All values of a tree with their paths, including keys that are not plain scalars and nesting that is too deep."""
    where = ".".join(keys) or "the document"
    yield where, value
    if not isinstance(value, dict | list):
        return
    if len(keys) == _MAX_DEPTH:
        yield f"{where[:20]}...", _TooDeep()
    for key, member in value.items() if isinstance(value, dict) else enumerate(value):
        if not isinstance(key, _PLAIN):
            yield f"a key of {where}", key
        yield from _members(member, *keys, str(key))


class _TooDeep:
    def __str__(self) -> str:
        return "nested too deep"


_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters except tabs and newlines, and characters that change the direction of text."""


def printable(text: str) -> str:
    """Return the text with control characters as escapes, such as `\\x1b` for the one that starts terminal codes."""
    return _HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def limited(text: str, most: int = 60) -> str:
    """Return the text, or its beginning and "..." if it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


_LONG_WORD = re.compile(r"\S{300,}")
_KEPT_AT_START, _KEPT_AT_END = 80, 20
"""Characters of a long word that are kept."""


def without_long_words(text: str) -> str:
    """Return the text with the middle of every word of 300 or more characters replaced by the word's length."""
    return _LONG_WORD.sub(
        lambda match: f"{match[0][:_KEPT_AT_START]}...({len(match[0]):,} characters)...{match[0][-_KEPT_AT_END:]}", text
    )


def has_control_characters(text: str) -> bool:
    """True if the text has control characters that a terminal would interpret."""
    return _HIDDEN.search(text) is not None
