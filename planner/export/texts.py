"""Settings as texts: a shell script with one argument to a line, or nested YAML, each with the origin as a comment."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from meshwright.planner.export.trainer import KeyValue, Value


def script(head: str, command: str, arguments: Iterable[tuple[str, str]]) -> str:
    """A script that runs a command with arguments, each with what it comes from; more may be given to the script."""
    lines = "".join(f"  {argument}  # {origin}\n" for argument, origin in arguments)
    comment = "".join(f"# {line}\n" for line in head.splitlines())
    return f"""\
#!/usr/bin/env bash
{comment}set -euo pipefail
arguments=(
{lines})
exec {command} "${{arguments[@]}}" "$@"
"""


def overrides(settings: Sequence[KeyValue]) -> list[tuple[str, str]]:
    """Writes keys as `key=value`, hydra's form."""
    return [(shlex.quote(f"{one.key}={_plain(one.value)}"), one.origin) for one in settings]


def flags(settings: Sequence[KeyValue]) -> list[tuple[str, str]]:
    """Writes keys as `--key value`, argparse's form: a flag alone where it is true, and left out where it is not."""
    return [
        (f"--{one.key}" if one.value is True else f"--{one.key} {_words(one.value)}", one.origin)
        for one in settings
        if one.value is not False and one.value is not None
    ]


def nested(settings: Sequence[KeyValue]) -> str:
    """Writes keys as YAML, a level for each part of a key."""
    tree: dict[str, Any] = {}
    for one in settings:
        *path, last = one.key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = one
    return "".join(_lines(tree, 0, lambda one: f"{json.dumps(one.value)}  # {one.origin}"))


def _lines(tree: dict[str, Any], depth: int, told: Callable[[KeyValue], str]) -> Iterable[str]:
    for key, value in tree.items():
        indent = "  " * depth
        if isinstance(value, KeyValue):
            yield f"{indent}{key}: {told(value)}\n"
        else:
            yield f"{indent}{key}:\n"
            yield from _lines(value, depth + 1, told)


def _words(value: Value) -> str:
    """One word, or two of a pair."""
    return " ".join(shlex.quote(_plain(part)) for part in (value if isinstance(value, tuple) else (value,)))


def _plain(value: Value) -> str:
    """Writes a value as a command line has it."""
    return "null" if value is None else json.dumps(value) if isinstance(value, bool) else str(value)
