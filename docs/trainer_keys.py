"""Reads the keys of another trainer from its package. Exports are checked against them:

python docs/trainer_keys.py verl verl-0.9.1-py3-none-any.whl > planner/trainers/data/verl.json
python docs/trainer_keys.py openrlhf openrlhf-0.11.2-*.whl > planner/trainers/data/openrlhf.json
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

_VERL = "verl/trainer/config/_generated_ppo_megatron_trainer.yaml"
_OPENRLHF = "openrlhf/cli/train_ppo_ray.py"
_LEFT_OUT = ("profiler", "global_profiler", "prometheus", "trace", "qat", "distillation", "skip", "transfer_queue")
"""Groups of verl that have no effect on how a step runs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=("verl", "openrlhf"))
    parser.add_argument("wheel", type=Path)
    arguments = parser.parse_args()
    with zipfile.ZipFile(arguments.wheel) as wheel:
        file = _VERL if arguments.trainer == "verl" else _OPENRLHF
        path = next(name for name in wheel.namelist() if name.endswith(file))
        text = wheel.read(path).decode()
        keys = dict(_leaves(yaml.safe_load(text)) if arguments.trainer == "verl" else _options(text))
        if arguments.trainer == "verl":
            keys |= _groups(yaml.safe_load(wheel.read(f"{Path(path).parent}/ppo_trainer.yaml")))
    version = arguments.wheel.name.split("-")[1]
    document = {"trainer": arguments.trainer, "version": version, "source": file, "keys": keys}
    sys.stdout.write(json.dumps(document, indent=1, sort_keys=True) + "\n")


def _leaves(tree: dict[str, Any], *keys: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if key in _LEFT_OUT or key == "_target_":
            continue
        if isinstance(value, dict) and value:
            yield from _leaves(value, *keys, key)
        else:
            yield ".".join((*keys, key)), value


def _groups(tree: dict[str, Any]) -> dict[str, Any]:
    """The config groups of hydra's defaults list, each with its default."""
    chosen = (one for one in tree["defaults"] if isinstance(one, dict))
    return {key: value for one in chosen for key, value in one.items() if "@" not in key}


def _options(text: str) -> Iterator[tuple[str, Any]]:
    """The flags that are added to argparse, with a plain name or with the prefix of a role."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            given = {one.arg: one.value for one in node.keywords}
            for name in _names(node.args[0]):
                yield name.removeprefix("--"), _default(given)


def _names(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        for prefix in ("actor", "critic"):
            yield "".join(one.value if isinstance(one, ast.Constant) else prefix for one in node.values)


def _default(given: dict[str | None, ast.expr]) -> Any:
    try:
        return ast.literal_eval(given["default"]) if "default" in given else None
    except ValueError:
        return None


if __name__ == "__main__":
    main()
