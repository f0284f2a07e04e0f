"""Settings as text: a shell script with one argument per line, or nested YAML, each with its origin as a comment."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from meshwright.planner.export.trainer import ConfigValue, KeyValue


def script(head: str, command: str, arguments: Iterable[tuple[str, str]]) -> str:
    """A script that runs a command with (argument, origin) pairs; arguments of the script itself are appended."""
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
    """Keys as `key=value`, in hydra's form, with their origins."""
    return [(shlex.quote(f"{setting.key}={_plain(setting.value)}"), setting.origin) for setting in settings]


def flags(settings: Sequence[KeyValue]) -> list[tuple[str, str]]:
    """Keys as `--key value`, in argparse's form, with their origins. True is a bare flag; False and None are left
    out."""
    return [
        (f"--{setting.key}" if setting.value is True else f"--{setting.key} {_words(setting.value)}", setting.origin)
        for setting in settings
        if setting.value is not False and setting.value is not None
    ]


def nested_yaml(settings: Sequence[KeyValue]) -> str:
    """Keys as YAML, a level for each part of a key."""
    tree: dict[str, Any] = {}
    for setting in settings:
        *path, last = setting.key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = setting
    return "".join(_lines(tree, 0, lambda setting: f"{json.dumps(setting.value)}  # {setting.origin}"))


def _lines(tree: dict[str, Any], depth: int, render: Callable[[KeyValue], str]) -> Iterable[str]:
    for key, value in tree.items():
        indent = "  " * depth
        if isinstance(value, KeyValue):
            yield f"{indent}{key}: {render(value)}\n"
        else:
            yield f"{indent}{key}:\n"
            yield from _lines(value, depth + 1, render)


def _words(value: ConfigValue) -> str:
    """One word, or two for a pair."""
    return " ".join(shlex.quote(_plain(part)) for part in (value if isinstance(value, tuple) else (value,)))


def _plain(value: ConfigValue) -> str:
    """A value as written on a command line."""
    return "null" if value is None else json.dumps(value) if isinstance(value, bool) else str(value)
