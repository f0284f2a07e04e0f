"""Two processes that use each other's objects: requests are lines of JSON, and each side runs its own code alone.

An object of the other side is never equal to a plain value and never has one in it by its own word, has no order with
one and becomes no number. What its methods answer, its truth among them, is its own. Arguments that a call has changed
are changed here too.
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

from meshwright.runtime.environment.plain_values import CHANGING, IMMUTABLE, packed, plain_base, renew, unpacked

_MOST_BYTES = 2**24
"""Of a message."""
_MOST_PRINTED = 2**20
"""Characters that are handed over with an answer."""

_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"),
    *("matmul", "and", "or", "xor", "lshift", "rshift"),
)
_ORDERS = ("lt", "le", "gt", "ge")
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
    **{f"__{name}__": getattr(operator, f"__{name}__") for name in (*_BINARY, *_ORDERS, *_UNARY)},
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
"""What one side may ask of an object of the other."""
_NAMES = frozenset({"__name__", "__qualname__", "__doc__"})


class PeerError(BaseException):
    """The other side has ended, or said what it may not."""


class Remote:
    """An object of the other side."""

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _NAMES:
            raise AttributeError(name)
        return self._peer.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._peer.ask("delete", self, name)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            return self._number == other._number or self._peer.ask("equal", self, other) is True
        plain = self._peer.ask("plain", self)
        return not isinstance(plain, Remote) and plain is not None and bool(plain == other)

    def __contains__(self, other: object) -> bool:
        """Whether what it holds or goes through has a plain value: its own word counts for other objects alone."""
        if isinstance(other, Remote):
            return self._peer.ask("__contains__", self, other) is True
        plain = self._peer.ask("plain", self)
        if plain is not None and not isinstance(plain, Remote):
            return other in plain
        return any(each is other or each == other for each in iter(self))

    def __hash__(self) -> int:
        return int(self._peer.ask("__hash__", self))


def _delegate(name: str) -> None:
    def method(self: Remote, /, *args: Any, **kwargs: Any) -> Any:
        return self._peer.ask(name, self, *args, **kwargs)

    setattr(Remote, name, method)


def _delegate_arithmetic(name: str, is_order: bool) -> None:
    def method(self: Remote, *others: Any) -> Any:
        if is_order and not isinstance(others[0], Remote):
            raise TypeError(f"an object of the code has no order with a {type(others[0]).__name__}")
        found = self._peer.ask(name, self, *others)
        if not isinstance(found, Remote) and not any(isinstance(other, Remote) for other in others):
            raise TypeError("an object of the code is no number")
        return found

    setattr(Remote, name, method)


for _name in _DELEGATED:
    if _name not in ("__hash__", "__contains__"):
        _delegate(_name)
for _name in (*_BINARY, *_UNARY, *_ORDERS, *(f"r{name}" for name in _BINARY)):
    _delegate_arithmetic(f"__{_name}__", _name in _ORDERS)


class Peer:
    """One side's end: asks the other, and answers what it asks meanwhile."""

    def __init__(
        self, incoming: BinaryIO, outgoing: BinaryIO, may_ask: Callable[[str, Sequence[Any]], bool] | None = None
    ) -> None:
        """`may_ask` says whether the other side may ask this of the first of these arguments, an object that it was
        given; without it the other side may ask all, and name functions of Python's modules."""
        self._in, self._out, self._may_ask = incoming, outgoing, may_ask
        self._own: list[Any] = []
        self._numbers: dict[int, int] = {}
        """By id() of an own object, its number."""
        self._exceptions: dict[int, type[BaseException]] = {}
        self._derived: dict[type, type] = {}
        self.printed: Callable[[], str] = str
        """What was printed here since it was called last."""

    def ask(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """The other side's answer. Raises what it raised, and PeerError where there is no other side any more."""
        given = [self.pack(arg) for arg in args]
        self.send({"ask": name, "args": given, "kwargs": {key: self.pack(value) for key, value in kwargs.items()}})
        while "ask" in (message := self.receive()):
            self._answer(message)
        try:
            sys.stdout.write(str(message.get("printed", "")))
            for place, changed in message.get("changed", ()):
                renew(kwargs[place] if isinstance(place, str) else args[place], self.unpack(changed))
            if "error" not in message:
                return self.unpack(message["value"])
            raised = self._exception(message["error"])
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise PeerError(f"an answer that is none: {error}") from None
        raise raised

    def serve(self) -> None:
        """Answers until the other side has ended."""
        while message := self.receive(may_end=True):
            self._answer(message)

    def send(self, message: dict[str, Any]) -> None:
        """One line."""
        line = json.dumps(message).encode() + b"\n"
        with suppress(BrokenPipeError):
            self._out.write(line)
            self._out.flush()

    def receive(self, *, may_end: bool = False) -> dict[str, Any]:
        """The next message; an empty one at the end where there may be one. Raises PeerError for what is none."""
        line = self._in.readline(_MOST_BYTES)
        if not line and may_end:
            return {}
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise PeerError(f"a message that is none: {error}") from None
        if not isinstance(message, dict) or not line.endswith(b"\n"):
            raise PeerError("a message that is none")
        return message

    def pack(self, value: Any) -> Any:
        """The value as JSON."""
        return packed(value, self._refer)

    def unpack(self, message: Any) -> Any:
        """The value that a message of the other side is. Raises ValueError, TypeError or KeyError where it is none."""
        return unpacked(message, self._resolve)

    def _answer(self, message: Mapping[str, Any]) -> None:
        name, given = str(message["ask"]), message["args"]
        answer: dict[str, Any] = {}
        args: list[Any] = []
        before: dict[int | str, tuple[Any, Any]] = {}
        """By place or name, what may change, and as JSON what it was."""
        try:
            args += [self.unpack(arg) for arg in given]
            kwargs = {key: self.unpack(value) for key, value in message["kwargs"].items()}
            places = itertools.chain[tuple[int | str, Any]](enumerate(args), kwargs.items())
            before = {place: (arg, self.pack(arg)) for place, arg in places if _may_change(arg)}
            if self._may_ask is not None and not self._may_ask(name, args):
                raise TypeError(f"{name} of {type(args[0]).__name__} is not for the code to ask")
            answer["value"] = self.pack(_REQUESTS[name](*args, **kwargs))
        except PeerError:
            raise
        except BaseException as error:
            answer["error"] = self._told(error)
        with suppress(Exception):
            after = ((place, self.pack(arg), was) for place, (arg, was) in before.items())
            answer["changed"] = [(place, now) for place, now, was in after if now != was]
        answer["printed"] = self.printed()[:_MOST_PRINTED]
        self.send(answer)

    def _refer(self, value: Any) -> dict[str, Any]:
        theirs = self._number_of_theirs(value)
        if theirs is not None:
            return {"yours": theirs}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": self._kinds(value)}
        if self._may_ask is not None and _is_of_python(value):
            return {"function": [value.__module__, value.__name__]}
        found: dict[str, Any] = {"mine": self._number(value)}
        return {**found, "plain": self.pack(plain_base(value))} if isinstance(value, IMMUTABLE) else found

    def _number_of_theirs(self, value: Any) -> int | None:
        """The other side's number for one of its objects; None for any other."""
        if isinstance(value, Remote):
            return value._number
        if type(value) in self._derived.values():
            return int(value._remote_number)
        return next((number for number, kind in self._exceptions.items() if kind is value), None)

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._own)
            self._own.append(value)
        return self._numbers[id(value)]

    def _resolve(self, message: Mapping[str, Any]) -> Any:
        if "yours" in message:
            return self._own[int(message["yours"])]
        if "exception" in message:
            return self._stand_in(message["exception"])
        if "function" in message and self._may_ask is None:
            module, name = message["function"]
            return getattr(importlib.import_module(module), name)
        number = int(message["mine"])
        return (
            self._derived_value(number, self.unpack(message["plain"])) if "plain" in message else Remote(self, number)
        )

    def _derived_value(self, number: int, plain: Any) -> Any:
        """A plain value that has the attributes of an object of the other side as well."""
        base = type(plain)
        if base not in IMMUTABLE:
            raise ValueError(f"{base.__name__} is no plain value")
        if base not in self._derived:

            def attribute(value: Any, name: str) -> Any:
                if name.startswith("_"):
                    raise AttributeError(name)
                return self.ask("get", Remote(self, value._remote_number), name)

            self._derived[base] = type(base.__name__, (base,), {"__getattr__": attribute})
        found = self._derived[base](plain)
        found._remote_number = number
        return found

    def _kinds(self, kind: type[BaseException]) -> list[Any]:
        """The classes of an exception from its own on, up to the built-in one that it derives from."""
        found: list[Any] = []
        for each in kind.__mro__:
            if getattr(builtins, each.__name__, None) is each:
                return [*found, each.__name__]
            found.append([self._number(each), each.__name__])
        return [*found, "Exception"]

    def _stand_in(self, kinds: list[Any]) -> type[BaseException]:
        """The class of this side for an exception of the other."""
        *own, name = kinds
        found = getattr(builtins, str(name))
        if not issubclass(found, Exception):
            found = RuntimeError  # an end or an interrupt of the code is none of the tests
        for number, title in reversed(own):
            found = self._exceptions.setdefault(int(number), type(str(title), (found,), {}))
        return found

    def _told(self, error: BaseException) -> dict[str, Any]:
        with suppress(Exception):
            return {"kinds": self._kinds(type(error)), "args": self.pack(list(error.args))}
        return {"kinds": ["RuntimeError"], "args": []}

    def _exception(self, message: Mapping[str, Any]) -> BaseException:
        kind = self._stand_in(message["kinds"])
        try:
            return kind(*self.unpack(message["args"]))
        except TypeError:
            return kind()


def _may_change(value: Any) -> bool:
    return type(value) in CHANGING or type(value).__name__ == "ndarray"


def _is_of_python(value: Any) -> bool:
    """Whether it is a function in C of a module of Python's own, which the other side has too."""
    module = sys.modules.get(str(getattr(value, "__module__", None)))
    is_found = isinstance(value, BuiltinFunctionType) and getattr(module, value.__name__, None) is value
    return is_found and str(value.__module__).partition(".")[0] in sys.stdlib_module_names
