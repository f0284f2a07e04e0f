"""Code and its tests, each in a process of its own: what the one defines, the other asks for, call by call.

The verdict is formed where the tests run. There the code is nothing but plain values and numbers of objects
(`remote.py`), so that it can pass a test only by giving the right values.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import io
import sys
from collections.abc import Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any, BinaryIO

from meshwright.runtime.environment.remote import Peer

_TESTS = "tests"
"""The module that classes of the tests belong to."""
_CALLED = (FunctionType, MethodType)


class _Printed(io.TextIOBase):
    """Keeps the first of what is printed between two answers, and drops the rest."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._left = 2**20

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._left > 0:
            self._parts.append(text[: self._left])
            self._left -= len(text)
        return len(text)

    def taken(self) -> str:
        text = "".join(self._parts)
        self._parts, self._left = [], 2**20
        return text


def offer(code: str, incoming: BinaryIO, outgoing: BinaryIO) -> None:
    """Runs the code, says which names it has defined, and answers calls of them until the other side has ended."""
    peer, printed = Peer(incoming, outgoing), _Printed()
    sys.stdout, peer.printed = printed, printed.taken
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "response", "exec"), space)
    names = {name: value for name, value in space.items() if not name.startswith("__")}
    modules = {name: value.__name__ for name, value in names.items() if isinstance(value, ModuleType)}
    peer.send({"names": {name: peer.pack(value) for name, value in names.items()}, "modules": modules})
    peer.serve()


def passes(tests: str, incoming: BinaryIO, outgoing: BinaryIO) -> bool:
    """Whether tests of what the other side offers run to their end. There has to be a statement at least."""
    try:
        tree = ast.parse(tests, _TESTS)
        peer = Peer(incoming, outgoing, _may_ask)
        first = peer.receive()
        offered = {str(name): peer.unpack(value) for name, value in first["names"].items()}
        space = {"__name__": _TESTS, **_taken(tree, offered, first["modules"])}
        exec(compile(tree, _TESTS, "exec"), space)
    except BaseException:  # a failed test, an end and whatever the other side has made of its answers
        return False
    return bool(tree.body)


def _may_ask(name: str, args: Sequence[Any]) -> bool:
    """The code may call what it was given, go on in it, and use attributes of objects of the tests' own classes."""
    on = args[0]
    if name == "__call__":
        return isinstance(on, _CALLED) or _TESTS in (type(on).__module__, getattr(on, "__module__", ""))
    if name in ("__iter__", "__next__"):
        return hasattr(on, "__iter__")
    if name in ("get", "set", "delete") and str(args[1]).startswith("__"):
        return False
    return type(on).__module__ == _TESTS and not isinstance(on, type)


def _taken(tree: ast.Module, offered: Mapping[str, Any], modules: Mapping[str, str]) -> dict[str, Any]:
    """The names that the tests get of the code. A name of Python's own means that of Python's own, unless it is the
    only one that the tests can mean: else code could replace what the tests compare with."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    of_python = {name for name in used & set(offered) if hasattr(builtins, name) or name in sys.stdlib_module_names}
    own = used & set(offered) - of_python - set(modules)
    if not own and len(of_python - set(modules)) == 1:
        of_python = set()
    taken = {name: value for name, value in offered.items() if name not in of_python}
    for name in set(modules) & used:
        taken[name] = _module(modules[name], offered[name])
    for name in of_python - set(modules):
        if name in sys.stdlib_module_names:
            taken[name] = importlib.import_module(name)
    return taken


def _module(name: str, other: Any) -> Any:
    """This side's own of that name; the other's where there is none here."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return other
