"""Encodes as JSON the values that tested code and its tests exchange.

Plain values are sent by value. Any other object stays in its process and is sent as a number that refers to it, so that
code of one process never runs in the other.
"""

from __future__ import annotations

import base64
import builtins
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeAlias

_EXACT_INTEGERS = 2**53
"""Integers below this are written as JSON numbers, larger ones in hexadecimal, which takes linear time."""

IMMUTABLE: tuple[type[Any], ...] = (int, float, str, bytes, tuple, frozenset)
"""An instance of a subclass of these types is sent by number together with its plain value."""
MUTABLE: tuple[type[Any], ...] = (list, dict, set, bytearray, deque)
_DICTIONARIES: tuple[type[Any], ...] = (dict, defaultdict, OrderedDict, Counter)
MUTABLE_VALUES: tuple[type[Any], ...] = (*MUTABLE, *_DICTIONARIES)
"""Types whose instances are sent by value and may be changed in place."""

_Pack: TypeAlias = Callable[[Any], Any]


def encode(value: Any, refer: Callable[[Any], dict[str, Any]]) -> Any:
    """Return the value as JSON; `refer` returns the message for an object that is not plain.

    Raises RecursionError for a value that is nested too deeply or contains itself.
    """
    kind: type[Any] = type(value)
    if value is None or kind in (bool, float, str) or (kind is int and -_EXACT_INTEGERS < value < _EXACT_INTEGERS):
        return value

    def pack(each: Any) -> Any:
        return encode(each, refer)

    if kind is list:
        return list(map(pack, value))
    if kind in _ENCODERS and not getattr(value, "tzinfo", None):
        return {kind.__name__: _ENCODERS[kind](value, pack)}
    if isinstance(value, type) and value in vars(builtins).values():
        return {"type": value.__name__}
    return _encode_array(value) or refer(value)


def decode(message: Any, resolve: Callable[[dict[str, Any]], Any]) -> Any:
    """Return the value that `encode` has encoded; `resolve` returns the object for a message that `refer` returned.

    Raises ValueError, TypeError or KeyError for a message that `encode` does not write.
    """

    def unpack(each: Any) -> Any:
        return decode(each, resolve)

    if isinstance(message, list):
        return list(map(unpack, message))
    if not isinstance(message, dict):
        return message
    ((kind, content), *more) = message.items()
    if more or kind not in _DECODERS:
        return resolve(message)
    return _DECODERS[kind](content, unpack)


def _items(value: Any, pack: _Pack) -> list[Any]:
    return list(map(pack, value))


def _pairs(value: Any, pack: _Pack) -> list[Any]:
    return [[pack(key), pack(each)] for key, each in value.items()]


def _text(value: Any, _: _Pack) -> str:
    return value.decode("latin-1")


_ENCODERS: Mapping[type, Callable[[Any, _Pack], Any]] = {
    int: lambda value, _: hex(value),
    bytes: _text,
    bytearray: _text,
    tuple: _items,
    set: _items,
    frozenset: _items,
    dict: _pairs,
    defaultdict: lambda value, pack: [pack(value.default_factory), _pairs(value, pack)],
    OrderedDict: _pairs,
    Counter: _pairs,
    deque: lambda value, pack: [_items(value, pack), value.maxlen],
    complex: lambda value, _: [value.real, value.imag],
    range: lambda value, pack: _items((value.start, value.stop, value.step), pack),
    Decimal: lambda value, _: str(value),
    Fraction: lambda value, pack: [pack(value.numerator), pack(value.denominator)],
    date: lambda value, _: value.isoformat(),
    datetime: lambda value, _: value.isoformat(),
    timedelta: lambda value, _: [value.days, value.seconds, value.microseconds],
    type(Ellipsis): lambda *_: None,
}


def _from_items(kind: type) -> Callable[[Any, _Pack], Any]:
    return lambda content, unpack: kind(map(unpack, content))


def _from_pairs(kind: type) -> Callable[[Any, _Pack], Any]:
    return lambda content, unpack: kind({unpack(key): unpack(each) for key, each in content})


_DECODERS: Mapping[str, Callable[[Any, _Pack], Any]] = {
    "int": lambda content, _: int(content, 16),
    "bytes": lambda content, _: content.encode("latin-1"),
    "bytearray": lambda content, _: bytearray(content.encode("latin-1")),
    **{kind.__name__: _from_items(kind) for kind in (tuple, set, frozenset)},
    **{kind.__name__: _from_pairs(kind) for kind in (dict, OrderedDict, Counter)},
    "defaultdict": lambda content, unpack: defaultdict(unpack(content[0]), _from_pairs(dict)(content[1], unpack)),
    "deque": lambda content, unpack: deque(map(unpack, content[0]), content[1]),
    "complex": lambda content, _: complex(*content),
    "range": lambda content, unpack: range(*map(unpack, content)),
    "Decimal": lambda content, _: Decimal(content),
    "Fraction": lambda content, unpack: Fraction(*map(unpack, content)),
    "date": lambda content, _: date.fromisoformat(content),
    "datetime": lambda content, _: datetime.fromisoformat(content),
    "timedelta": lambda content, _: timedelta(*content),
    "ellipsis": lambda *_: Ellipsis,
    "type": lambda content, _: _type(content),
    "array": lambda content, _: _array(*content),
}


def _encode_array(value: Any) -> dict[str, Any] | None:
    """Encode an array or scalar of NumPy if this process has imported it; None for anything else."""
    numpy: Any = sys.modules.get("numpy")
    is_numpy = type(value).__module__ == "numpy" and isinstance(value, (numpy.ndarray, numpy.generic))
    if not is_numpy or value.dtype.hasobject:
        return None
    content = base64.b64encode(value.tobytes()).decode()
    return {"array": [value.dtype.str, list(value.shape), content, isinstance(value, numpy.generic)]}


def _type(name: str) -> type:
    builtin = getattr(builtins, name)
    if not isinstance(builtin, type):
        raise ValueError(f"{name} is no type")
    return builtin


def _array(dtype: str, shape: list[int], content: str, is_number: bool) -> Any:
    import numpy  # noqa: PLC0415 - most tests have no arrays

    array = numpy.frombuffer(base64.b64decode(content), numpy.dtype(dtype)).reshape(shape)
    return array[()] if is_number else array.copy()


def plain_base(value: Any) -> Any:
    """Convert an instance of a subclass of a plain type to that type; None for anything else."""
    for kind in (*IMMUTABLE, *MUTABLE):
        if isinstance(value, kind):
            return kind.__new__(kind, value) if kind in IMMUTABLE else kind(value)
    return None


def update_in_place(old: Any, new: Any) -> None:
    """Make `old`, a mutable value, equal to `new` in place. Raises ValueError if their types differ."""
    if type(old) is not type(new):
        raise ValueError("a value has changed its type")
    if isinstance(old, list | bytearray):
        for index, (old_item, new_item) in enumerate(zip(old, new, strict=False)):
            if isinstance(old_item, MUTABLE) and type(old_item) is type(new_item):
                update_in_place(old_item, new_item)
                new[index] = old_item
        old[:] = new
    elif isinstance(old, MUTABLE):
        old.clear()
        (old.extend if isinstance(old, deque) else old.update)(new)
    else:
        old[...] = new
