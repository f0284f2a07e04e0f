"""Runs code and its tests in two processes: the tests call what the code defines through remote calls.

The process of the tests decides whether they pass. It sees what the code defines and returns only as plain values and
numbered references (`remote_objects.py`), so that code passes a comparison with a value only by returning that value.
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

from meshwright.runtime.environment.remote_objects import Peer

_TESTS = "tests"
"""Name of the module that the classes of the tests belong to."""
_FUNCTION_TYPES = (FunctionType, MethodType)
_NAME = re.compile(r"[^\W\d]\w*")


class _LimitedOutput(io.TextIOBase):
    """A standard output that keeps the first MiB of text between two answers and drops the rest."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._remaining = 2**20

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._remaining > 0:
            self._parts.append(text[: self._remaining])
            self._remaining -= len(text)
        return len(text)

    def take(self) -> str:
        text = "".join(self._parts)
        self._parts, self._remaining = [], 2**20
        return text


def serve_code(code: str, incoming: BinaryIO, outgoing: BinaryIO) -> None:
    """Run the code, send the names that it defines, and answer calls to them until the other side ends."""
    peer, printed = Peer(incoming, outgoing), _LimitedOutput()
    sys.stdout, peer.take_printed = printed, printed.take
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "response", "exec"), namespace)
    names = {name: value for name, value in namespace.items() if not name.startswith("__")}
    modules = {name: value.__name__ for name, value in names.items() if isinstance(value, ModuleType)}
    peer.send({"names": {name: peer.encode_value(value) for name, value in names.items()}, "modules": modules})
    peer.serve()


def passes_tests(tests: str, incoming: BinaryIO, outgoing: BinaryIO) -> bool:
    """True if the tests have at least one statement and run to their end with the names that the other side offers."""
    try:
        tree = ast.parse(tests, _TESTS)
        peer = Peer(incoming, outgoing, _is_allowed)
        offer_message = peer.receive()
        offered = {str(name): peer.decode_value(value) for name, value in offer_message["names"].items()}
        namespace = {"__name__": _TESTS, **_visible_names(tree, offered, offer_message["modules"])}
        exec(compile(tree, _TESTS, "exec"), namespace)
    except BaseException:  # a failed test, an exit, or an error that a message of the code caused
        return False
    return bool(tree.body)


def _is_allowed(name: str, args: Sequence[Any]) -> bool:
    """True if the code may make this request: call or iterate what it was given, or use attributes of instances of the
    tests' classes."""
    target = args[0]
    if name == "__call__":
        return isinstance(target, _FUNCTION_TYPES) or _TESTS in (
            type(target).__module__,
            getattr(target, "__module__", ""),
        )
    if name in ("__iter__", "__next__"):
        return hasattr(target, "__iter__")
    if name in ("get", "set", "delete") and str(args[1]).startswith("__"):
        return False
    return type(target).__module__ == _TESTS and not isinstance(target, type)


def _visible_names(tree: ast.Module, offered: Mapping[str, Any], modules: Mapping[str, str]) -> dict[str, Any]:
    """Return the names of the code that the tests see: those that they mention, without those of builtins and modules.

    A name of a builtin or a standard module keeps Python's meaning, or code could replace what the tests compare with.
    The exception is such a name if it is the only one of the code that the tests use. What the code claims about its
    names is not trusted.
    """
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    mentioned = used | _names_in_strings(tree)
    visible = {name: value for name, value in offered.items() if name in mentioned and not name.startswith("__")}
    python_names = {name for name in visible if hasattr(builtins, name) or name in sys.stdlib_module_names}
    modules_found = {name: _module(modules[name]) for name in set(modules) & set(visible) - python_names}
    imported = {name: module for name, module in modules_found.items() if module is not None}
    python_functions = used & python_names - (set(modules) & sys.stdlib_module_names)
    if not used & set(visible) - python_names and len(python_functions) == 1:
        python_names -= python_functions
    for name in python_names:
        del visible[name]
        if name in sys.stdlib_module_names:
            imported[name] = importlib.import_module(name)
    return visible | imported


def _names_in_strings(tree: ast.Module) -> set[str]:
    """Return the names in strings of the tests, which may evaluate them."""
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return {word for text in texts for word in _NAME.findall(text)}


def _module(name: str) -> ModuleType | None:
    """Import a module by name in this process; None if there is none."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
