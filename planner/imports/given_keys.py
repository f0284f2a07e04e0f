"""What a configuration gives, by the trainer's own keys, above the defaults that it has otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from meshwright.planner.export.known_keys import KnownKeys
from meshwright.planner.imports.scripts import words
from meshwright.profiles.errors import BadInput
from meshwright.profiles.values import MOST_YAML_BYTES, read_text, yaml_value

_OVERRIDE = re.compile(r"^[+~]{0,2}([A-Za-z_][\w.]*)=(.*)$", re.S)
_REFERENCE = re.compile(r"^\$\{(?:oc\.select:)?([\w.]+)(?:,(.*))?\}$")
_PRODUCT = re.compile(r"^\$\{mul:(.+?),\s*(.+)\}$")
_COMMAND = re.compile(r"(^|/)train\w*\.py$|^openrlhf\.cli\.\w+$")
"""What flags are given to; those before it are a launcher's."""

_MOST_FILES = 32
_DEEPEST = 12
_LONGEST_WORD = 500
"""Of those that may be more than a text: the library takes seconds over some longer ones."""


@dataclass(frozen=True, kw_only=True)
class GivenKeys:
    """`given` are the keys of the configuration; `known` has the others' defaults. A key asked for is filled in.

    `otherwise` are keys whose values depend on a branch of a script, with the values that they have in another branch,
    `missing` files that the configuration goes on from and that are not beside it, and `asked` the keys that were asked
    for so far.
    """

    known: KnownKeys
    given: Mapping[str, Any]
    otherwise: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    asked: set[str] = field(default_factory=set, compare=False)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Keys of the configuration that the trainer's known version does not have."""
        return tuple(key for key in self.given if not (self.known.knows(key) or self.known.knows(f"+{key}")))

    @property
    def unread(self) -> tuple[str, ...]:
        """Keys of the configuration that nobody has asked for."""
        return tuple(key for key in self.given if key not in self.asked)

    @property
    def notes(self) -> Iterator[str]:
        """Sentences on keys that a script gives in several ways."""
        for key, value in self.otherwise.items():
            if key in self.asked:
                yield f"{key}={self.given.get(key)} is read, and in another branch of the script it is {value}."

    def has(self, key: str) -> bool:
        """Whether the configuration gives the key itself."""
        self.asked.add(key)
        return key in self.given

    def value(self, key: str) -> Any:
        """The value of a key, from the configuration or by default, references followed."""
        self.asked.add(key)
        return self._followed(self.given.get(key, self.known.keys.get(key)), key, 0)

    def whole(self, key: str) -> int:
        """A whole number; raises BadInput naming the key where it is none."""
        found = self.value(key)
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        if not isinstance(found, int) or isinstance(found, bool):
            raise BadInput(f"{key}={found!r} is no whole number; give it one, the plan depends on it.")
        return found

    def whole_or(self, key: str, otherwise: int) -> int:
        """A whole number, or another where the key gives none or 0; raises BadInput naming the key for the rest."""
        return self.whole(key) if self.value(key) else otherwise

    def number(self, key: str) -> float:
        """A number; raises BadInput naming the key where it is none."""
        found = self.value(key)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise BadInput(f"{key}={found!r} is no number; give it one.")
        return float(found)

    def pair(self, key: str) -> tuple[float, float]:
        """Two numbers; raises BadInput naming the key where there are not two."""
        found = self.value(key)
        if not isinstance(found, list) or len(found) != 2:
            raise BadInput(f"{key}={found!r} is not two numbers; give it the low one and the high one.")
        return float(found[0]), float(found[1])

    def _followed(self, value: Any, key: str, depth: int) -> Any:
        if not isinstance(value, str) or depth > _DEEPEST:
            return value
        if product := _PRODUCT.match(value):
            one, other = (self._followed(_plain(part.strip()), key, depth + 1) for part in product.groups())
            return one * other if isinstance(one, int) and isinstance(other, int) else None
        reference = _REFERENCE.match(value)
        if reference is None:
            return value
        target, default = reference.groups()
        if target.startswith("."):
            target = f"{key.rpartition('.')[0]}{target}"
        self.asked.add(target)
        found = self.given.get(target, self.known.keys.get(target))
        if found is None and default is not None:
            found = _plain(default.strip())
        return self._followed(found, target, depth + 1)


def read_overrides(path: Path, known: KnownKeys) -> GivenKeys:
    """A YAML file, or a script that gives a command `key=value`. Raises BadInput for what is neither."""
    if path.suffix in (".yaml", ".yml"):
        missing: list[str] = []
        return GivenKeys(known=known, given=_flat(path, missing, []), missing=tuple(missing))
    return _of_script(path, known, lambda found: _overrides(found, known))


def read_flags(path: Path, known: KnownKeys, present: Mapping[str, str] | None = None) -> GivenKeys:
    """A script that gives a command `--key value`, or numbers as `--key 1 2`. Raises BadInput for one without such.

    `present` are names that flags had, with those that they have now.
    """
    return _of_script(path, known, lambda found: _flags(found, present or {}))


def _of_script(path: Path, known: KnownKeys, keys: Callable[[list[str]], dict[str, Any]]) -> GivenKeys:
    """What its words say, with the last branches and with the first."""
    text = read_text(path, "configuration", MOST_YAML_BYTES)
    found, first = keys(words(text)), keys(words(text, first=True))
    otherwise = {key: value for key, value in first.items() if found.get(key) != value}
    return _required(path, GivenKeys(known=known, given=found, otherwise=otherwise))


def _overrides(given: list[str], known: KnownKeys) -> dict[str, Any]:
    matches = filter(None, map(_OVERRIDE.match, given))
    return {match[1]: _plain(match[2]) for match in matches if match[1] in known.keys or "." in match[1]}


def _flags(given: list[str], present: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    key: str | None = None
    command = max((place for place, word in enumerate(given) if _COMMAND.search(word)), default=-1)
    for word in given[command + 1 :]:
        if word.startswith("--"):
            name, equals, text = word.removeprefix("--").partition("=")
            key = present.get(name, name)
            found[key] = _plain(text) if equals else True
            key = None if equals else key
        elif key is not None:
            value = _plain(word)
            if found[key] is True:
                found[key] = value
            elif _is_number(value) and (isinstance(found[key], list) or _is_number(found[key])):
                found[key] = [*(found[key] if isinstance(found[key], list) else [found[key]]), value]
            else:
                key = None
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _required(path: Path, found: GivenKeys) -> GivenKeys:
    if not any(found.known.knows(key) for key in found.given):
        raise BadInput(
            f"configuration {path} has no key of {found.known.trainer} {found.known.version}; give the file that "
            "starts a run of it."
        )
    return found


def _flat(path: Path, missing: list[str], read: list[Path]) -> dict[str, Any]:
    """The leaves of a YAML file over those of the files that its `defaults` name beside it; adds those not there."""
    read.append(path)
    if len(read) > _MOST_FILES:
        raise BadInput(f"configuration {read[0]} goes on from more than {_MOST_FILES} files; write it as one.")
    tree = yaml_value(read_text(path, "configuration", MOST_YAML_BYTES), f"configuration {path}")
    if not isinstance(tree, dict):
        raise BadInput(f"configuration {path} is no mapping of keys; give the file that configures a run.")
    defaults = tree.pop("defaults", None)
    found: dict[str, Any] = {}
    for name in defaults if isinstance(defaults, list) else [defaults] if defaults else []:
        base = path.parent / str(name) if isinstance(name, str) else None
        if base is not None and base.exists():
            found |= _flat(base, missing, read)
        else:
            missing.append(str(name))
    return found | dict(_leaves(tree))


def _leaves(tree: Mapping[str, Any], *keys: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, *keys, str(key))
        else:
            yield ".".join((*keys, str(key))), value


def _plain(text: str) -> Any:
    """The value that YAML makes of one word; the word where it makes none."""
    if len(text) > _LONGEST_WORD:
        return text
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    if isinstance(value, str) and re.fullmatch(r"[0-9.]+e-?[0-9]+", value):  # YAML 1.1 wants a dot
        return float(value)
    return text if isinstance(value, dict | list) else value
