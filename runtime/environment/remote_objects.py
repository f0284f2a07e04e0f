"""Remote objects: two processes use each other's objects through messages, each a line of JSON, and each process runs
only its own code. So the tests of a program need not trust the program, which runs in the sandbox.

A remote object cannot claim to equal or to contain a plain value; it cannot be compared in order with one or be turned
into a number. But the other process decides what its methods return, and whether it is true. Arguments that a remote
call changes are updated on the calling side.
"""

from __future__ import annotations

import builtins
import importlib
import itertools
import json
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import BuiltinFunctionType
from typing import Any, BinaryIO

from meshwright.runtime.environment.plain_values import (
    IMMUTABLE,
    MUTABLE_VALUES,
    decode,
    encode,
    plain_base,
    update_in_place,
)

_MAX_MESSAGE_BYTES = 2**24
"""Largest size of a message."""
_MAX_PRINTED_CHARACTERS = 2**20
"""Largest number of printed characters that are sent with an answer."""


_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"),
    *("matmul", "and", "or", "xor", "lshift", "rshift"),
)
_ORDERINGS = ("lt", "le", "gt", "ge")
_UNARY = ("neg", "pos", "invert")
_DELEGATED: Mapping[str, Callable[..., Any]] = {
    "__call__": lambda on, /, *args, **kwargs: on(*args, **kwargs),
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__delitem__": operator.delitem,
    "__contains__": operator.contains,
    "__len__": len,
    "__iter__": iter,
    "__reversed__": reversed,
    "__next__": next,
    "__bool__": bool,
    "__str__": str,
    "__repr__": repr,
    "__format__": format,
    "__hash__": hash,
    "__enter__": lambda on: on.__enter__(),
    "__exit__": lambda on, *_: on.__exit__(None, None, None),
    "__instancecheck__": lambda on, other: isinstance(other, on),
    "__subclasscheck__": lambda on, other: issubclass(other, on),
    **{f"__{name}__": getattr(operator, f"__{name}__") for name in (*_BINARY, *_ORDERINGS, *_UNARY)},
}
_REQUESTS: Mapping[str, Callable[..., Any]] = {
    **_DELEGATED,
    **{f"__r{name}__": lambda on, other, do=_DELEGATED[f"__{name}__"]: do(other, on) for name in _BINARY},
    "equal": lambda on, other: bool(on == other),
    "plain": plain_base,
    "get": getattr,
    "set": setattr,
    "delete": delattr,
}
"""Requests that one side may make on an object of the other."""
_READABLE_NAMES = frozenset({"__name__", "__qualname__", "__doc__"})


class PeerError(BaseException):
    """The other process has ended, or sent an invalid message."""


class RemoteObject:
    """A reference to an object of the other process."""

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _READABLE_NAMES:
            raise AttributeError(name)
        return self._peer.request("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.request("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._peer.request("delete", self, name)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RemoteObject):
            return self._number == other._number or self._peer.request("equal", self, other) is True
        plain = self._peer.request("plain", self)
        return not isinstance(plain, RemoteObject) and plain is not None and bool(plain == other)

    def __contains__(self, other: object) -> bool:
        """True if it contains the value. A plain value is compared with its items on this side, so that the object
        cannot falsely claim to contain it."""
        if isinstance(other, RemoteObject):
            return self._peer.request("__contains__", self, other) is True
        plain = self._peer.request("plain", self)
        if plain is not None and not isinstance(plain, RemoteObject):
            return other in plain
        return any(each is other or each == other for each in iter(self))

    def __hash__(self) -> int:
        return int(self._peer.request("__hash__", self))


def _delegate(name: str) -> None:
    def method(self: RemoteObject, /, *args: Any, **kwargs: Any) -> Any:
        return self._peer.request(name, self, *args, **kwargs)

    setattr(RemoteObject, name, method)


def _delegate_arithmetic(name: str, is_order: bool) -> None:
    def method(self: RemoteObject, *others: Any) -> Any:
        if is_order and not isinstance(others[0], RemoteObject):
            raise TypeError(f"an object of the code has no order with a {type(others[0]).__name__}")
        result = self._peer.request(name, self, *others)
        if not isinstance(result, RemoteObject) and not any(isinstance(other, RemoteObject) for other in others):
            raise TypeError("an object of the code is no number")
        return result

    setattr(RemoteObject, name, method)


for _name in _DELEGATED:
    if _name not in ("__hash__", "__contains__"):
        _delegate(_name)
for _name in (*_BINARY, *_UNARY, *_ORDERINGS, *(f"r{name}" for name in _BINARY)):
    _delegate_arithmetic(f"__{_name}__", _name in _ORDERINGS)


class Peer:
    """One end of the connection: it sends requests, and answers those that arrive while it waits."""

    def __init__(
        self, incoming: BinaryIO, outgoing: BinaryIO, is_allowed: Callable[[str, Sequence[Any]], bool] | None = None
    ) -> None:
        """`is_allowed` decides by a request's name and arguments whether the other side may make it.

        The first argument is the object of this side that the request is made on. Without `is_allowed` every request is
        answered, and the other side may name functions of standard modules.
        """
        self._in, self._out, self._is_allowed = incoming, outgoing, is_allowed
        self._own_objects: list[Any] = []
        self._own_numbers: dict[int, int] = {}
        """Numbers of own objects, by their id()."""
        self._exceptions: dict[int, type[BaseException]] = {}
        """Local classes that represent exception classes of the other side, by their numbers there."""
        self._derived: dict[type, type] = {}
        """The subclass of each plain type whose values fetch other attributes from the other side."""
        self.take_printed: Callable[[], str] = str
        """Returns what this process has printed since the last call."""

    def request(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Make a request and return its result. Raises what the other side raised, and PeerError if it has ended."""
        encoded = [self.encode_value(arg) for arg in args]
        self.send(
            {"ask": name, "args": encoded, "kwargs": {key: self.encode_value(value) for key, value in kwargs.items()}}
        )
        while "ask" in (message := self.receive()):
            self._answer(message)
        try:
            sys.stdout.write(str(message.get("printed", "")))
            for position, changed in message.get("changed", ()):
                update_in_place(
                    kwargs[position] if isinstance(position, str) else args[position], self.decode_value(changed)
                )
            if "error" not in message:
                return self.decode_value(message["value"])
            raised = self._decoded_error(message["error"])
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise PeerError(f"an invalid answer: {error}") from None
        raise raised

    def serve(self) -> None:
        """Answer requests until the other side ends."""
        while message := self.receive(may_end=True):
            self._answer(message)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message as one line."""
        line = json.dumps(message).encode() + b"\n"
        with suppress(BrokenPipeError):
            self._out.write(line)
            self._out.flush()

    def receive(self, *, may_end: bool = False) -> dict[str, Any]:
        """Return the next message, or an empty one at the end if `may_end`. Raises PeerError for an invalid message."""
        line = self._in.readline(_MAX_MESSAGE_BYTES)
        if not line and may_end:
            return {}
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise PeerError(f"an invalid message: {error}") from None
        if not isinstance(message, dict) or not line.endswith(b"\n"):
            raise PeerError("an invalid message")
        return message

    def encode_value(self, value: Any) -> Any:
        """Encode a value for the other side."""
        return encode(value, self._refer)

    def decode_value(self, message: Any) -> Any:
        """Decode a value of the other side. Raises ValueError, TypeError or KeyError if it is invalid."""
        return decode(message, self._resolve)

    def _answer(self, message: Mapping[str, Any]) -> None:
        name, encoded = str(message["ask"]), message["args"]
        answer: dict[str, Any] = {}
        args: list[Any] = []
        before: dict[int | str, tuple[Any, Any]] = {}
        """Mutable arguments by position or name, each with its encoding before the call."""
        try:
            args += [self.decode_value(arg) for arg in encoded]
            kwargs = {key: self.decode_value(value) for key, value in message["kwargs"].items()}
            positions = itertools.chain[tuple[int | str, Any]](enumerate(args), kwargs.items())
            before = {position: (arg, self.encode_value(arg)) for position, arg in positions if _is_mutable(arg)}
            if self._is_allowed is not None and not self._is_allowed(name, args):
                raise TypeError(f"{name} of {type(args[0]).__name__} is not for the code to ask")
            answer["value"] = self.encode_value(_REQUESTS[name](*args, **kwargs))
        except PeerError:
            raise
        except BaseException as error:
            answer["error"] = self._encoded_error(error)
        with suppress(Exception):
            after = ((position, self.encode_value(arg), old) for position, (arg, old) in before.items())
            answer["changed"] = [(position, new) for position, new, old in after if new != old]
        answer["printed"] = self.take_printed()[:_MAX_PRINTED_CHARACTERS]
        self.send(answer)

    def _refer(self, value: Any) -> dict[str, Any]:
        """Return a reference to an object, by its number: "yours" on the other side, "mine" on this one."""
        their_number = self._their_number(value)
        if their_number is not None:
            return {"yours": their_number}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": self._classes(value)}
        if self._is_allowed is not None and _is_standard_function(value):
            return {"function": [value.__module__, value.__name__]}
        reference: dict[str, Any] = {"mine": self._number(value)}
        return (
            {**reference, "plain": self.encode_value(plain_base(value))} if isinstance(value, IMMUTABLE) else reference
        )

    def _their_number(self, value: Any) -> int | None:
        """Return the other side's number of one of its objects; None for any other object."""
        if isinstance(value, RemoteObject):
            return value._number
        if type(value) in self._derived.values():
            return int(value._remote_number)
        return next((number for number, kind in self._exceptions.items() if kind is value), None)

    def _number(self, value: Any) -> int:
        if id(value) not in self._own_numbers:
            self._own_numbers[id(value)] = len(self._own_objects)
            self._own_objects.append(value)
        return self._own_numbers[id(value)]

    def _resolve(self, message: Mapping[str, Any]) -> Any:
        if "yours" in message:
            return self._own_objects[int(message["yours"])]
        if "exception" in message:
            return self._local_class(message["exception"])
        if "function" in message and self._is_allowed is None:
            module, name = message["function"]
            return getattr(importlib.import_module(module), name)
        number = int(message["mine"])
        return (
            self._derived_value(number, self.decode_value(message["plain"]))
            if "plain" in message
            else RemoteObject(self, number)
        )

    def _derived_value(self, number: int, plain: Any) -> Any:
        """Return a plain value that also has the attributes of an object of the other side."""
        base = type(plain)
        if base not in IMMUTABLE:
            raise ValueError(f"{base.__name__} is no plain value")
        if base not in self._derived:

            def attribute(value: Any, name: str) -> Any:
                if name.startswith("_"):
                    raise AttributeError(name)
                return self.request("get", RemoteObject(self, value._remote_number), name)

            self._derived[base] = type(base.__name__, (base,), {"__getattr__": attribute})
        derived = self._derived[base](plain)
        derived._remote_number = number
        return derived

    def _classes(self, kind: type[BaseException]) -> list[Any]:
        """Return the classes of an exception, from its own to the built-in class that it derives from."""
        classes: list[Any] = []
        for each in kind.__mro__:
            if getattr(builtins, each.__name__, None) is each:
                return [*classes, each.__name__]
            classes.append([self._number(each), each.__name__])
        return [*classes, "Exception"]

    def _local_class(self, kinds: list[Any]) -> type[BaseException]:
        """Return the class that represents an exception class of the other side here."""
        *derived, name = kinds
        local_class = getattr(builtins, str(name))
        if not issubclass(local_class, Exception):
            local_class = RuntimeError  # an exit or interrupt that the program raises must not end its tests
        for number, class_name in reversed(derived):
            local_class = self._exceptions.setdefault(int(number), type(str(class_name), (local_class,), {}))
        return local_class

    def _encoded_error(self, error: BaseException) -> dict[str, Any]:
        with suppress(Exception):
            return {"kinds": self._classes(type(error)), "args": self.encode_value(list(error.args))}
        return {"kinds": ["RuntimeError"], "args": []}

    def _decoded_error(self, message: Mapping[str, Any]) -> BaseException:
        kind = self._local_class(message["kinds"])
        try:
            return kind(*self.decode_value(message["args"]))
        except TypeError:
            return kind()


def _is_mutable(value: Any) -> bool:
    return type(value) in MUTABLE_VALUES or type(value).__name__ == "ndarray"


def _is_standard_function(value: Any) -> bool:
    """True for a C function of a standard module, which the other side has too."""
    module = sys.modules.get(str(getattr(value, "__module__", None)))
    is_c_function = isinstance(value, BuiltinFunctionType) and getattr(module, value.__name__, None) is value
    return is_c_function and str(value.__module__).partition(".")[0] in sys.stdlib_module_names
