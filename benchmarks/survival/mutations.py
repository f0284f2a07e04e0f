"""Documents that are almost right: a good one with a few edits, as hypothesis draws them.

An edit changes a value of a tree, a byte of a text, or puts something in the place of the file that is none.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import yaml
from hypothesis import strategies as st


class Form(StrEnum):
    """How a file is written, which says how it is taken apart and put together again."""

    JSON = "json"
    YAML = "yaml"
    LINES = "lines"  # of JSON
    SAFETENSORS = "safetensors"
    TEXT = "text"
    BYTES = "bytes"


class Special(StrEnum):
    """What stands where a file should."""

    PIPE = "pipe"
    DIRECTORY = "directory"
    MISSING = "missing"
    ENDLESS = "endless"  # a link to /dev/zero
    CIRCLE = "circle"  # a link to itself
    SPARSE = "sparse"  # a TiB of nothing


Key = str | int
Content = bytes | Special

_VALUES: Sequence[Any] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 1.5, -0.5, 2**31, 2**63, 10**30, 10**400, 1e308, 1e-320),
    *(float("nan"), float("inf"), float("-inf"), "", "x", "NaN", "1e999", "\0", "\ud800", "\u202e", "é" * 40),
    *("../../../../etc/passwd", "/dev/zero", "/dev/stdin", "pipe", "~", "..", "x" * 100_000, "%s%n{}", "<b>[/b]"),
    *([], {}, [[]], {"": None}, [None] * 1000, [{"a": 1}], "${x}", "file:///etc/passwd", -(2**63) - 1, 2**53 + 1),
)
_DEPTHS = (5, 40, 3000, 60_000)
_BYTES: Sequence[bytes] = (
    *(b"\0", b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r", b"\t", b'"', b"{", b"}", b"[", b"]", b","),
    *(
        b":",
        b"&a ",
        b"*a ",
        b"<<: ",
        b"!!python/name:os.system ",
        b"- ",
        b"#",
        b"\\",
        b"'",
        b"9" * 6000,
        b"-",
        b"1e999",
    ),
    *(b"\xe2\x80\xa8", b"$((", b"${x}", b"`", b"NaN", b"\n\n", b"=", b"--", b"(" * 300),
)
_BOMBS: Sequence[bytes] = (
    b"",
    b"null",
    b"[]",
    b"{}",
    b'"text"',
    b"\xff\xfe{\0}\0",
    b"[" * 200_000,
    b'{"a":' * 200_000,
    b"- " * 5000,
    b"a0: &a0 [x, x]\n"
    + b"".join(b"a%d: &a%d [%s]\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 10)),
    b"&a [*a]",
    b"a: &a {<<: *a}",
    b"".join(b"V%d=$V%d$V%d\n" % (n, n - 1, n - 1) for n in range(1, 40)) + b"python3 train.py --lr $V39\n",
    b"1" * 200_000,
    b'{"a":1,"a":2}',
    b"\n" * 100_000,
)


class Edit(NamedTuple):
    """One change of a tree: at a place, to what."""

    place: tuple[Key, ...]
    change: Callable[[Any, Key], None]


@st.composite
def mutated(draw: st.DrawFn, good: bytes, form: Form) -> Content:
    """A file like `good` with some edits. The more of them the rarer."""
    how = draw(st.integers(0, 19))
    if how == 0:
        return draw(st.sampled_from(Special))
    if how == 1:
        return draw(st.sampled_from(_BOMBS))
    if how < 14 and form not in (Form.TEXT, Form.BYTES):
        return _taken_apart(draw, good, form)
    return _bytes_edited(draw, good)


def _taken_apart(draw: st.DrawFn, good: bytes, form: Form) -> bytes:
    if form is Form.JSON:
        return _json(draw, _edited(draw, json.loads(good)))
    if form is Form.YAML:
        tree = _edited(draw, yaml.safe_load(good))
        return _yaml(tree) if draw(st.booleans()) else _json(draw, tree)
    if form is Form.LINES:
        lines = good.splitlines()
        number = draw(st.integers(0, len(lines) - 1))
        edited = _json(draw, _edited(draw, json.loads(lines[number])))
        return b"\n".join([*lines[:number], edited, *lines[number + 1 :], b""])
    length = int.from_bytes(good[:8], "little")
    header = _json(draw, _edited(draw, json.loads(good[8 : 8 + length])))
    said = draw(
        st.sampled_from((len(header), len(header), len(header), 0, 1, len(header) + 1, 2**63, 2**64 - 1, 10**9))
    )
    return said.to_bytes(8, "little") + header + good[8 + length :]


def _edited(draw: st.DrawFn, tree: Any) -> Any:
    tree = copy.deepcopy(tree)
    whole = [tree]
    places = [*_places(tree)]
    for _ in range(draw(st.integers(1, 3))):
        place = places[draw(st.integers(0, len(places) - 1))]
        change = draw(st.sampled_from((_replace, _replace, _replace, _delete, _rename, _wrap, _swap, _repeat)))
        try:
            inside: Any = whole
            for key in place[:-1]:
                inside = inside[key]
            change(draw, inside, place[-1])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):  # an edit before has taken it away
            continue
    return whole[0] if whole else None


def _places(tree: Any, *keys: Key) -> Iterator[tuple[Key, ...]]:
    """Of every value of a tree, which is the only member of a list."""
    here: tuple[Key, ...] = (*keys,) or (0,)
    yield here
    members = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in members:
        yield from _places(value, *here, key)


_LARGEST = 2**1000
"""Of whole numbers that floats come near."""


def _replace(draw: st.DrawFn, inside: Any, key: Key) -> None:
    number = inside[key]
    if isinstance(number, int | float) and not isinstance(number, bool) and draw(st.booleans()):
        third = number / 3 if abs(number) < _LARGEST else number // 3  # further on no quotient is a float
        inside[key] = draw(st.sampled_from((number + 1, number - 1, -number, number * 2, third, number * 1000)))
    else:
        inside[key] = copy.deepcopy(draw(st.sampled_from(_VALUES)))


def _delete(_draw: st.DrawFn, inside: Any, key: Key) -> None:
    del inside[key]


def _rename(draw: st.DrawFn, inside: Any, key: Key) -> None:
    if isinstance(inside, dict):
        inside[draw(st.sampled_from(("x", "", f"{key}s", "__class__", "\0", "y" * 5000)))] = inside.pop(key)
    else:
        inside.pop(key)


def _wrap(draw: st.DrawFn, inside: Any, key: Key) -> None:
    value, depth = inside[key], draw(st.sampled_from(_DEPTHS[:2]))
    for _ in range(depth):
        value = [value]
    inside[key] = value


def _swap(_draw: st.DrawFn, inside: Any, key: Key) -> None:
    """With the neighbour before it."""
    keys = [*inside] if isinstance(inside, dict) else [*range(len(inside))]
    other = keys[keys.index(key) - 1]
    inside[key], inside[other] = inside[other], inside[key]


def _repeat(draw: st.DrawFn, inside: Any, key: Key) -> None:
    if isinstance(inside, list):
        inside[key:key] = [inside[key]] * draw(st.sampled_from((1, 2, 100)))  # type: ignore[misc]
    else:
        inside[f"{key} again"] = inside[key]


def _json(draw: st.DrawFn, tree: Any) -> bytes:
    text = json.dumps(tree, default=str)
    extra = draw(st.integers(0, 30))
    if extra == 0 and text.startswith("{") and ":" in text:
        text = "{" + text[1 : text.index(":") + 1] + "0," + text[1:]  # a key given twice
    elif extra == 1:
        depth = draw(st.sampled_from(_DEPTHS))
        text = (
            text.replace("null", "[" * depth + "]" * depth, 1) if "null" in text else "[" * depth + text + "]" * depth
        )
    return text.encode()


def _yaml(tree: Any) -> bytes:
    return yaml.safe_dump(tree).encode("utf-8", errors="surrogatepass")


def _bytes_edited(draw: st.DrawFn, good: bytes) -> bytes:
    content = good
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(content)))
        how = draw(st.integers(0, 5))
        if how == 0:
            content = content[:at]
        elif how == 1:
            content = content[:at] + draw(st.sampled_from(_BYTES)) + content[at:]
        elif how == 2:
            content = content[:at] + content[at + draw(st.integers(1, 64)) :]
        elif how == 3:
            part = content[at : at + draw(st.integers(1, 200))]
            content = content[:at] + part * draw(st.sampled_from((2, 3, 50))) + content[at:]
        elif at < len(content):
            flipped = content[at] ^ (1 << draw(st.integers(0, 7)))
            content = content[:at] + bytes([flipped]) + content[at + 1 :]
    return content
