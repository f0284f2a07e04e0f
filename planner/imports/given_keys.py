"""What a configuration gives, by the trainer's own keys, above the defaults that it has otherwise."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from meshwright.planner.export.known_keys import KnownKeys
from meshwright.planner.imports.key_effects import OTHERWISE, has_no_effect, named
from meshwright.planner.imports.scripts import read_script
from meshwright.planner.imports.shell_words import Word
from meshwright.profiles.errors import BadInput
from meshwright.profiles.values import MOST_YAML_BYTES, read_text, yaml_value

_OVERRIDE = re.compile(r"^[+~]{0,2}([A-Za-z_][\w.]*)=(.*)$", re.S)
_REFERENCE = re.compile(r"^\$\{(?:oc\.select:)?([\w.]+)(?:,(.*))?\}$")
_PRODUCT = re.compile(r"^\$\{mul:\s*(.+)\}$")
_COMMAND = re.compile(r"(^|/)(train\w*|run_\w+)\.py$|^openrlhf\.cli\.\w+$")
"""What flags are given to; those before it are a launcher's."""
_SEVERAL = re.compile(r"\[[@*]\]\}|^\$\{?[@*]")
"""Words of an array, which give flags of their own and are no value of the flag before them."""
_EXPANSION = re.compile(r"^[\"']?(\$\w+|\$[@*]|\$\{[^}]*\}|\$\(.*\)|`.*`)[\"']?$", re.S)
"""Words that are what one variable or command gives, and may therefore be several."""
_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")
"""Numbers that YAML 1.1 takes for texts, since they have no dot or no sign."""

_MOST_FILES = 32
_DEEPEST = 12
_LONGEST_WORD = 500
"""Of those that may be more than a text: the library takes seconds over some longer ones."""


@dataclass(frozen=True, kw_only=True)
class GivenKeys:
    """`given` are the keys of the configuration; `known` has the others' defaults. A key asked for is filled in.

    `otherwise` are keys whose values depend on a branch of a script, with the values that they have in another branch,
    `undecided` keys whose values the script does not say, with the reason, `missing` files that the configuration goes
    on from and that are not beside it, `command` the words of the command, `remarks` sentences on what of a script was
    not followed, `changed` the keys whose values are others than its own, and `asked` those that were asked for so far.
    """

    known: KnownKeys
    given: Mapping[str, Any]
    otherwise: Mapping[str, Any] = field(default_factory=dict)
    undecided: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    changed: frozenset[str] = frozenset()
    asked: set[str] = field(default_factory=set, compare=False)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Keys of the configuration that the trainer's known version does not have."""
        return tuple(key for key in self.given if not (self.known.knows(key) or self.known.knows(f"+{key}")))

    @property
    def unread(self) -> tuple[str, ...]:
        """Keys of the configuration that nobody has asked for."""
        return tuple(key for key in self.given if key not in self.asked)

    def accounted(self, trainer: str, idle: Iterable[str] = ()) -> tuple[dict[str, str], tuple[str, ...]]:
        """The keys that nobody has asked for: those that may change a step, each with its value and what is to be known
        of it, and those that a plan does not depend on or that have their default.

        `idle` are patterns of keys that other keys leave without a use, such as those of a model that there is none of.
        """
        unused = tuple(idle)

        def is_plain(key: str) -> bool:
            is_idle = any(fnmatchcase(key, pattern) for pattern in unused)
            return is_idle or self._has_default(key) or has_no_effect(trainer, key)

        plain = [key for key in self.unread if is_plain(key)]
        told = named(trainer, (key for key in self.unread if key not in plain))
        return {f"{key}={self.given[key]}": reason for key, reason in told.items()}, tuple(plain)

    def strange(self, trainer: str, plain: Iterable[str]) -> Iterator[str]:
        """Sentences on keys of which nothing is known: those that the trainer's known version does not have, that
        nobody has asked for, that are not among the plain ones, and that are of no kind whose meaning is known.

        Raises BadInput for one whose value was changed.
        """
        kinds = named(trainer, self.unknown)
        known = {*self.asked, *plain, *(key for key, reason in kinds.items() if reason != OTHERWISE)}
        for key in self.unknown:
            if key not in known:
                if key in self.changed:
                    raise BadInput(f"--set {key}: {trainer} {self.known.version} has no such key; {self._nearest(key)}")
                yield f"{key} is no key of {trainer}, {self.known.version}, and says nothing here."

    def _nearest(self, key: str) -> str:
        near = difflib.get_close_matches(key, self.known.keys, n=1)
        return f"did you mean {near[0]!r}?" if near else "leave it out, it would change nothing."

    def _has_default(self, key: str) -> bool:
        """Whether a key has the value that it has where it is not given; one that the trainer's known version does not
        have is off then."""
        if key not in self.known.keys:
            return self.given[key] is None or self.given[key] is False
        return bool(self.given[key] == self.known.keys[key])

    @property
    def notes(self) -> Iterator[str]:
        """Sentences on what of a script was not followed, and on keys that it gives in several ways."""
        yield from self.remarks
        for key, value in self.otherwise.items():
            if key in self.asked:
                yield f"{key}={self.given.get(key)} is read, and in another branch of the script it is {value}."

    def has(self, key: str) -> bool:
        """Whether the configuration gives the key itself."""
        self.asked.add(key)
        return key in self.given

    def value(self, key: str) -> Any:
        """The value of a key, from the configuration or by default, references followed.

        Raises BadInput for a key that the script gives a value that cannot be known from it.
        """
        self.asked.add(key)
        self._require_decided(key)
        return self._followed(self.given.get(key, self.known.keys.get(key)), key, 0)

    def text(self, key: str) -> str | None:
        """The text of a key that decides nothing by itself, such as a path: undecided parts stay as written."""
        if key in self.undecided:
            self.asked.add(key)
            return str(self.given[key])
        found = self.value(key)
        return None if found is None else str(found)

    def _require_decided(self, key: str) -> None:
        if key in self.undecided:
            raise BadInput(
                f"{key}={self.given.get(key)}: {self.undecided[key]}, so that its value is not known; give it as "
                f"--set {key}=VALUE."
            )

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
            factors = [self._followed(_plain(part), key, depth + 1) for part in _arguments(product[1])]
            if all(isinstance(factor, int) and not isinstance(factor, bool) for factor in factors):
                return math.prod(factors)
            return None
        reference = _REFERENCE.match(value)
        if reference is None:
            return value
        target, default = reference.groups()
        if target.startswith("."):
            target = _relative(key, target)
        self.asked.add(target)
        self._require_decided(target)
        found = self.given.get(target, self.known.keys.get(target))
        if found is None and default is not None:
            found = _plain(default.strip())
        return self._followed(found, target, depth + 1)


def read_overrides(path: Path, known: KnownKeys, changed: Mapping[str, Any] | None = None) -> GivenKeys:
    """A YAML file, or a script that gives a command `key=value`; `changed` are keys with values in place of its own.

    Raises BadInput for what is neither.
    """
    if path.suffix in (".yaml", ".yml"):
        missing: list[str] = []
        found = GivenKeys(known=known, given=_flat(path, missing, []), missing=tuple(missing))
        return _with(found, changed or {})
    return _of_script(path, known, lambda words: _overrides(words, known), changed or {})


def read_flags(
    path: Path,
    known: KnownKeys,
    present: Mapping[str, str] | None = None,
    changed: Mapping[str, Any] | None = None,
) -> GivenKeys:
    """A script that gives a command `--key value`, or numbers as `--key 1 2`.

    `changed` are keys with values in place of its own, `present` names that flags had with those that they have now.

    Raises BadInput for a script without such a command.
    """
    return _of_script(path, known, lambda words: _flags(words, present or {}), changed or {})


def read_changes(texts: Iterable[str]) -> dict[str, Any]:
    """The keys and values of `key=value` texts. Raises BadInput for a text of another form."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise BadInput(f"--set {text}: it is no key of the configuration with a value; write KEY=VALUE.")
        found[key.strip().removeprefix("--").lstrip("+")] = _plain(value)
    return found


_Keys: TypeAlias = tuple[dict[str, Any], dict[str, str]]
"""Keys of a command with their values, and those of them that are undecided with the reason."""


def _with(found: GivenKeys, changed: Mapping[str, Any]) -> GivenKeys:
    """The same with other values for some keys."""
    undecided = {key: reason for key, reason in found.undecided.items() if key not in changed}
    otherwise = {key: value for key, value in found.otherwise.items() if key not in changed}
    given = {**found.given, **changed}
    return replace(found, given=given, undecided=undecided, otherwise=otherwise, changed=frozenset(changed))


def _of_script(
    path: Path, known: KnownKeys, keys: Callable[[Sequence[Word]], _Keys], changed: Mapping[str, Any]
) -> GivenKeys:
    """What the command with the most keys of the trainer says, with the last branches and with the first."""
    text = read_text(path, "configuration", MOST_YAML_BYTES)

    def fullest(commands: Sequence[tuple[Word, ...]]) -> tuple[tuple[Word, ...], _Keys]:
        found = [(command, keys(command)) for command in commands]
        return max(found, key=lambda one: sum(map(known.knows, one[1][0])), default=((), ({}, {})))

    script = read_script(text, path)
    command, (given, undecided) = fullest(script.commands)
    _, (first, _) = fullest(read_script(text, path, first=True).commands)
    others = sum(known.knows(key) for other in script.commands if other is not command for key in keys(other)[0])
    remarks = [*script.notes, *_unknown_words(command)]
    if others:
        remarks.append("the script runs several commands of the trainer: the one with the most keys is read.")
    found = GivenKeys(
        known=known,
        given=given,
        otherwise={key: value for key, value in first.items() if given.get(key) != value},
        undecided=undecided,
        command=tuple(word.text for word in command),
        remarks=tuple(remarks),
    )
    return _with(_required(path, found), changed)


def _unknown_words(command: Sequence[Word]) -> Iterator[str]:
    """Sentences on words of which it is not known which keys they give."""
    for before, word in pairwise((Word(""), *command)):
        is_value = before.text.startswith("--") and "=" not in before.text and not _SEVERAL.search(word.text)
        if word.reasons and _EXPANSION.match(word.text) and not is_value:
            yield f"{word.text} may give more keys, which are not known: {'; '.join(word.reasons)}."


def _overrides(command: Sequence[Word], known: KnownKeys) -> _Keys:
    given: dict[str, Any] = {}
    undecided: dict[str, str] = {}
    for word in command:
        match = _OVERRIDE.match(word.text)
        if match and (match[1] in known.keys or "." in match[1]):
            given[match[1]] = word.text.partition("=")[2] if word.reasons else _plain(match[2])
            undecided.pop(match[1], None)
            if word.reasons:
                undecided[match[1]] = "; ".join(word.reasons)
    return given, undecided


def _flags(command: Sequence[Word], present: Mapping[str, str]) -> _Keys:
    given: dict[str, Any] = {}
    undecided: dict[str, str] = {}
    key: str | None = None
    begin = max((place for place, word in enumerate(command) if _COMMAND.search(word.text)), default=-1)
    for word in command[begin + 1 :]:
        if word.text.startswith("--"):
            name, equals, text = word.text.removeprefix("--").partition("=")
            key = present.get(name, name)
            given[key] = (text if word.reasons else _plain(text)) if equals else True
            undecided.pop(key, None)
            if equals and word.reasons:
                undecided[key] = "; ".join(word.reasons)
            key = None if equals else key
        elif key is not None and word.reasons:
            if given[key] is True and not _SEVERAL.search(word.text):
                given[key], undecided[key] = word.text, "; ".join(word.reasons)
            key = None
        elif key is not None:
            value = _plain(word.text)
            if given[key] is True:
                given[key] = value
            elif _is_number(value) and (isinstance(given[key], list) or _is_number(given[key])):
                given[key] = [*(given[key] if isinstance(given[key], list) else [given[key]]), value]
            else:
                key = None
    return given, undecided


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
    if isinstance(value, str) and _FLOAT.fullmatch(value):
        return float(value)
    is_text = isinstance(value, dict | list) or (isinstance(value, int) and ":" in text)  # 1:20 is no number of seconds
    return text if is_text or not isinstance(value, bool | int | float | str | None) else value


def _arguments(text: str) -> list[str]:
    """The parts between commas that are outside of braces."""
    found, depth = [""], 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return [part.strip() for part in found]


def _relative(key: str, target: str) -> str:
    """The key that a reference with leading dots names: one for beside the key, each further one a level up."""
    name = target.lstrip(".")
    above = key.split(".")[: -(len(target) - len(name))]
    return ".".join((*above, name))
