"""Reads the keys of another trainer from its package. Exports are checked against them:

python docs/trainer_keys.py verl verl-0.9.1-py3-none-any.whl > planner/trainers/data/verl.json
python docs/trainer_keys.py openrlhf openrlhf-0.11.2-*.whl > planner/trainers/data/openrlhf.json
python docs/trainer_keys.py skyrl skyrl-0.3.0-py3-none-any.whl > planner/trainers/data/skyrl.json
python docs/trainer_keys.py areal areal-1.0.4-py3-none-any.whl > planner/trainers/data/areal.json
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

_FILES = {
    "verl": "verl/trainer/config/_generated_ppo_megatron_trainer.yaml",
    "openrlhf": "openrlhf/cli/train_ppo_ray.py",
    "skyrl": "skyrl/train/config/config.py",
    "areal": "areal/api/cli_args.py",
}
"""The file of each trainer's package that has its keys."""
_ROOTS = {"skyrl": "SkyRLTrainConfig", "areal": "PPOConfig"}
"""The dataclass of a whole configuration, for trainers whose keys are fields of dataclasses."""
_LEFT_OUT = ("profiler", "global_profiler", "prometheus", "trace", "qat", "distillation", "skip", "transfer_queue")
"""Groups of verl that have no effect on how a step runs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=_FILES)
    parser.add_argument("wheel", type=Path)
    arguments = parser.parse_args()
    with zipfile.ZipFile(arguments.wheel) as wheel:
        file = _FILES[arguments.trainer]
        path = next(name for name in wheel.namelist() if name.endswith(file))
        text = wheel.read(path).decode()
        if arguments.trainer == "verl":
            keys = dict(_leaves(yaml.safe_load(text)))
            keys |= _groups(yaml.safe_load(wheel.read(f"{Path(path).parent}/ppo_trainer.yaml")))
        elif arguments.trainer == "openrlhf":
            keys = dict(_options(text))
        else:
            keys = dict(_Dataclasses(ast.parse(text)).keys(_ROOTS[arguments.trainer]))
    version = arguments.wheel.name.split("-")[1]
    document = {"trainer": arguments.trainer, "version": version, "source": file, "keys": keys}
    if arguments.trainer in _ROOTS:
        document["new_keys_have_plus"] = False
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


class _Dataclasses:
    """The fields of a module's dataclasses, as keys with their defaults.

    A field whose default is a dictionary is a key with an empty mapping as its default, so any key below it is known. A
    default that is computed at run time is None.
    """

    def __init__(self, module: ast.Module) -> None:
        self._classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
        self._constants = {
            target.id: node.value
            for node in module.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def keys(self, name: str, *prefix: str, given: dict[str, ast.expr] | None = None) -> Iterator[tuple[str, Any]]:
        """The keys of a dataclass; `given` are defaults that its owner gives in place of its own."""
        for field, annotation, default in self._fields(name):
            yield from self._key((*prefix, field), annotation, (given or {}).get(field, default))

    def _fields(self, name: str) -> Iterator[tuple[str, ast.expr, ast.expr | None]]:
        node = self._classes[name]
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in self._classes:
                own = {statement.target.id for statement in node.body if _is_field(statement)}
                yield from (field for field in self._fields(base.id) if field[0] not in own)
        for statement in node.body:
            if _is_field(statement) and not statement.target.id.startswith("_"):
                yield statement.target.id, statement.annotation, statement.value

    def _key(self, path: tuple[str, ...], annotation: ast.expr, default: ast.expr | None) -> Iterator[tuple[str, Any]]:
        nested = next(
            (node.id for node in ast.walk(annotation) if isinstance(node, ast.Name) and node.id in self._classes), None
        )
        value = self._made(default)
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in self._classes:
            given = {one.arg: one.value for one in value.keywords if one.arg}
            yield from self.keys(value.func.id, *path, given=given)
        elif nested and not self._is_enumeration(nested):
            yield from self.keys(nested, *path)
        elif isinstance(value, ast.Dict) or (isinstance(value, ast.Name) and value.id == "dict"):
            yield ".".join(path), {}
            literal = ast.literal_eval(value) if isinstance(value, ast.Dict) else {}
            yield from ((".".join((*path, key)), entry) for key, entry in literal.items())
        else:
            yield ".".join(path), _literal(value)

    def _is_enumeration(self, name: str) -> bool:
        return any(isinstance(base, ast.Name) and base.id == "Enum" for base in self._classes[name].bases)

    def _made(self, default: ast.expr | None) -> ast.expr | None:
        """The expression that gives a default, inside `field`, a factory, a lambda, a copy or a constant."""
        if isinstance(default, ast.Lambda):
            return self._made(default.body)
        if isinstance(default, ast.Name) and default.id in self._classes:
            return ast.Call(func=default, args=[], keywords=[])
        if isinstance(default, ast.Name) and default.id in self._constants:
            return self._made(self._constants[default.id])
        if isinstance(default, ast.Call) and getattr(default.func, "id", "") == "field":
            given = {one.arg: one.value for one in default.keywords}
            return self._made(given.get("default_factory") or given.get("default"))
        if isinstance(default, ast.Call) and getattr(default.func, "attr", "") == "deepcopy":
            return self._made(default.args[0])
        return default


def _is_field(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and "ClassVar" not in ast.dump(statement.annotation)
    )


def _literal(value: ast.expr | None) -> Any:
    if isinstance(value, ast.Name) and value.id == "list":
        return []
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "int":
        return int(ast.literal_eval(value.args[0]))
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


if __name__ == "__main__":
    main()
