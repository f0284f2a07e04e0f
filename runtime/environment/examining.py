"""Code and its tests, each in a process of its own: what the one defines, the other asks for, call by call.

The verdict is formed where the tests run. There the code is nothing but plain values and numbers of objects
(`remote.py`), so that it passes a comparison with a value only by giving that value.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import io
import re
import sys
from collections.abc import Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any, BinaryIO

from meshwright.runtime.environment.remote import Peer

_TESTS = "tests"
"""The module that classes of the tests belong to."""
_CALLED = (FunctionType, MethodType)
_NAME = re.compile(r"[^\W\d]\w*")


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
    """The names that the tests get of the code: those that they mention, and none that Python gives a meaning of its
    own. A name of Python's own means that of Python's own, unless it is the only one that the tests can mean: else code
    could replace what the tests compare with. What the code says of its names is not believed."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    mentioned = used | _words_of_texts(tree)
    taken = {name: value for name, value in offered.items() if name in mentioned and not name.startswith("__")}
    of_python = {name for name in taken if hasattr(builtins, name) or name in sys.stdlib_module_names}
    known = {name: _module(modules[name]) for name in set(modules) & set(taken) - of_python}
    imported = {name: module for name, module in known.items() if module is not None}
    functions = used & of_python - (set(modules) & sys.stdlib_module_names)
    if not used & set(taken) - of_python and len(functions) == 1:
        of_python -= functions
    for name in of_python:
        del taken[name]
        if name in sys.stdlib_module_names:
            imported[name] = importlib.import_module(name)
    return taken | imported


def _words_of_texts(tree: ast.Module) -> set[str]:
    """Names in texts of the tests, which may evaluate them."""
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return {word for text in texts for word in _NAME.findall(text)}


def _module(name: str) -> ModuleType | None:
    """This side's own of that name, where there is one."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
