"""The keys of a trainer's configuration: the keys of the known version with their defaults, and the values that a
script or a YAML file sets.

Values stay under the trainer's own keys: nothing here knows their meaning. Keys that are read are recorded, so that
those which were never read can be listed. `data/` has a file of keys for each trainer, extracted by
`docs/trainer_keys.py` from the package or repository that `source` and `version` name.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import as_file, files
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from pydantic import JsonValue

from meshwright.planner.trainers.key_effects import NO_FIELD, has_no_effect, reasons_not_read
from meshwright.planner.trainers.shell_expansion import Word
from meshwright.planner.trainers.shell_script import read_script
from meshwright.profiles.documents import Document, read_json
from meshwright.profiles.errors import BadInput
from meshwright.profiles.untrusted_text import MAX_YAML_BYTES, limited, read_text, yaml_value


class KnownKeys(Document):
    """A trainer's keys with their defaults; below a key whose default is an empty mapping, any key is accepted.

    `new_keys_have_plus` says whether such a key is written with a + in front, as in Hydra.
    """

    trainer: str
    version: str
    source: str
    keys: dict[str, JsonValue]
    new_keys_have_plus: bool = True

    def knows(self, key: str) -> bool:
        """True if the trainer accepts this key, or adds it to a mapping that takes any name."""
        if key in self.keys:
            return True
        if key.startswith("+") is not self.new_keys_have_plus:
            return False
        parents = key.removeprefix("+").split(".")[:-1]
        prefixes = (".".join(parents[: n + 1]) for n in range(len(parents)))
        return any(self.keys.get(prefix) == {} or prefix in self._open_mappings for prefix in prefixes)

    def has_keys_below(self, key: str) -> bool:
        """True if a key is a mapping, whose value has keys of its own."""
        return self.keys.get(key) == {} or any(known.startswith(f"{key}.") for known in self.keys)

    @property
    def _open_mappings(self) -> frozenset[str]:
        """Mappings called `override_...`, which take keys of any name."""
        parents = (key.rpartition(".")[0] for key in self.keys)
        return frozenset(parent for parent in parents if parent.rpartition(".")[2].startswith("override_"))


@cache
def known_keys(trainer: str) -> KnownKeys:
    """Read the keys of a trainer by the name of its file."""
    with as_file(files("meshwright.planner.trainers") / "data" / f"{trainer}.json") as path:
        return read_json(KnownKeys, path, "keys of another trainer")


_OVERRIDE = re.compile(r"^[+~]{0,2}([A-Za-z_][\w.]*)=(.*)$", re.S)
_REFERENCE = re.compile(r"^\$\{(?:oc\.select:)?([\w.]+)(?:,(.*))?\}$")
_PRODUCT = re.compile(r"^\$\{mul:\s*(.+)\}$")
"""An interpolation of OmegaConf that multiplies; `_REFERENCE` matches one that refers to another key."""
_PROGRAM = re.compile(r"(^|/)(train\w*|run_\w+)\.py$|^openrlhf\.cli\.\w+$")
"""The word of a command that names the training program; flags before it belong to a launcher."""
_ARRAY_EXPANSION = re.compile(r"\[[@*]\]\}|^\$\{?[@*]")
"""Expansions of an array, which holds separate flags and is not the value of the flag before it."""
_EXPANSION = re.compile(r"^[\"']?(\$\w+|\$[@*]|\$\{[^}]*\}|\$\(.*\)|`.*`)[\"']?$", re.S)
"""Words that one variable or command expands to, and that may therefore be several."""
_EXPONENT_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")
"""Numbers that YAML 1.1 reads as strings, since they have no dot or no sign."""

_SELF = "_self_"
"""The entry of Hydra's `defaults` that represents the configuration itself."""
_MAX_FILES = 32
_MAX_DEPTH = 12
_SIMILAR = 0.75
"""Smallest similarity (difflib) of a key, and of each word in it, that is suggested in place of an unknown one."""
_MAX_MATCHES = 10
_MAX_YAML_WORD = 500
"""Characters of a word that is parsed as YAML; the library takes seconds over some longer ones."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """A trainer's configuration: `values` are its keys, `known` has the defaults of all others.

    `other_branch` holds, for keys whose value depends on a branch of a script, the value in another branch.
    `undecided` are keys whose value the script does not determine, with the reason. `missing` are base files that
    the configuration names and that do not exist beside it. `directory` is that of the configuration's file.
    `command` are the words of the command, `remarks` sentences on parts of the script that were not followed,
    `changed` the keys that the user overrode, and `read_keys` the keys that were read so far.
    """

    known: KnownKeys
    values: Mapping[str, Any]
    other_branch: Mapping[str, Any] = field(default_factory=dict)
    undecided: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    directory: Path = Path()
    command: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    changed: frozenset[str] = frozenset()
    read_keys: set[str] = field(default_factory=set, compare=False)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Keys of the configuration that the trainer's known version does not have."""
        return tuple(key for key in self.values if not (self.known.knows(key) or self.known.knows(f"+{key}")))

    @property
    def unread(self) -> tuple[str, ...]:
        """Keys of the configuration that were not read."""
        return tuple(key for key in self.values if key not in self.read_keys)

    def split_unread(self, trainer: str, unused: Iterable[str] = ()) -> tuple[dict[str, str], tuple[str, ...]]:
        """Split the keys that were not read in two: those that may change a step, as `key=value` with the reason why
        they are not read, and those that a plan does not depend on or that have their default.

        `unused` are patterns of keys that other keys make unused, such as those of a model that the job lacks. Raises
        BadInput for a key that the user overrode and the trainer's known version does not have.
        """
        unused_patterns = tuple(unused)

        def is_plain(key: str) -> bool:
            is_unused = any(fnmatchcase(key, pattern) for pattern in unused_patterns)
            return is_unused or self._has_default(key) or has_no_effect(trainer, key)

        plain = [key for key in self.unread if is_plain(key)]
        reasons = reasons_not_read(trainer, (key for key in self.unread if key not in plain))
        unknown = {key for key in self.unknown if reasons.get(key) == NO_FIELD}
        named = {key: self._unknown_key(trainer, key) if key in unknown else reason for key, reason in reasons.items()}
        return {f"{key}={limited(str(self.values[key]), 120)}": reason for key, reason in named.items()}, tuple(plain)

    def _unknown_key(self, trainer: str, key: str) -> str:
        """The reason why a key of no known meaning is not read: the trainer's known version does not have it.

        Raises BadInput for such a key that the user overrode.
        """
        close = difflib.get_close_matches(key, self.known.keys, n=_MAX_MATCHES, cutoff=_SIMILAR)
        match = next((known for known in close if _is_misspelt(key, known)), None)
        suggestion = f"; did you mean {match!r}?" if match else ""
        if key in self.changed:
            way_out = suggestion or "; leave it out, it would change nothing."
            raise BadInput(f"--set {key}: {trainer} {self.known.version} has no such key{way_out}")
        return f"it is not a key of {trainer} {self.known.version}{suggestion}"

    def _has_default(self, key: str) -> bool:
        """True if a key has its default, which is None or False for one that the trainer's known version lacks."""
        if key not in self.known.keys:
            return self.values[key] is None or self.values[key] is False
        return bool(self.values[key] == self.known.keys[key])

    @property
    def notes(self) -> Iterator[str]:
        """Sentences on parts of the script that were not followed, and on keys whose value depends on a branch."""
        yield from self.remarks
        for key, value in self.other_branch.items():
            if key in self.read_keys:
                read, other = (limited(str(one), 120) for one in (self.values.get(key), value))
                yield f"{key}={read} is read, and in another branch of the script it is {other}."

    def has(self, key: str) -> bool:
        """True if the configuration itself gives the key."""
        self.read_keys.add(key)
        return key in self.values

    def value(self, key: str) -> Any:
        """The value of a key, from the configuration or the default, with references resolved.

        Raises BadInput for a key whose value the script does not determine.
        """
        self.read_keys.add(key)
        self._require_decided(key)
        return self._resolve(self.values.get(key, self.known.keys.get(key)), key, 0)

    def text(self, key: str) -> str | None:
        """The value, as text, of a key that no plan depends on, such as a path; undecided parts stay as written."""
        if key in self.undecided:
            self.read_keys.add(key)
            return str(self.values[key])
        value = self.value(key)
        return None if value is None else str(value)

    def _require_decided(self, key: str) -> None:
        if key in self.undecided:
            raise BadInput(
                f"{key}={limited(str(self.values.get(key)), 120)}: {self.undecided[key]}, so its value is not known; "
                f"give it as --set {key}=VALUE."
            )

    def integer(self, key: str) -> int:
        """The integer value of a key. Raises BadInput naming the key where its value is not an integer."""
        value = self.value(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise BadInput(f"{key}={limited(repr(value))} is not a whole number; give one, the plan depends on it.")
        return value

    def integer_or(self, key: str, default: int) -> int:
        """The integer value of a key, or `default` where it is absent or 0.

        Raises BadInput naming the key where its value is neither absent nor an integer.
        """
        return self.integer(key) if self.value(key) else default

    def number(self, key: str) -> float:
        """The numeric value of a key. Raises BadInput naming the key where its value is not a number."""
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadInput(f"{key}={limited(repr(value))} is not a number; give one.")
        return float(value)

    def pair(self, key: str) -> tuple[float, float]:
        """The two numbers of a key. Raises BadInput naming the key where there are not two."""
        value = self.value(key)
        if not isinstance(value, list) or len(value) != 2:
            raise BadInput(f"{key}={limited(repr(value))} is not two numbers; give the low and the high one.")
        return float(value[0]), float(value[1])

    def _resolve(self, value: Any, key: str, depth: int) -> Any:
        if not isinstance(value, str) or depth > _MAX_DEPTH:
            return value
        if product := _PRODUCT.match(value):
            factors = [self._resolve(_parse_scalar(part), key, depth + 1) for part in _split_arguments(product[1])]
            if all(isinstance(factor, int) and not isinstance(factor, bool) for factor in factors):
                return math.prod(factors)
            return None
        reference = _REFERENCE.match(value)
        if reference is None:
            return value
        target, default = reference.groups()
        if target.startswith("."):
            target = _resolve_relative(key, target)
        self.read_keys.add(target)
        self._require_decided(target)
        target_value = self.values.get(target, self.known.keys.get(target))
        if target_value is None and default is not None:
            target_value = _parse_scalar(default.strip())
        return self._resolve(target_value, target, depth + 1)


def read_overrides(path: Path, known: KnownKeys, changed: Mapping[str, Any] | None = None) -> TrainerConfig:
    """Read a YAML file, or a script whose command takes `key=value`.

    `changed` are keys whose values override those of the file.

    Raises BadInput for a file that is neither.
    """
    if path.suffix in (".yaml", ".yml"):
        missing: list[str] = []
        config = TrainerConfig(
            known=known, values=_read_leaves(path, missing, []), missing=tuple(missing), directory=path.parent
        )
        return _override(config if missing else _require_trainer_keys(path, config), changed or {})
    return _read_command(path, known, lambda words: _overrides(words, known), changed or {})


def read_flags(
    path: Path,
    known: KnownKeys,
    current_names: Mapping[str, str] | None = None,
    changed: Mapping[str, Any] | None = None,
) -> TrainerConfig:
    """Read a script whose command takes `--key value`, or several numbers as `--key 1 2`.

    `changed` are keys whose values override those of the script; `current_names` maps former names of flags to current
    ones.

    Raises BadInput for a script without such a command.
    """
    return _read_command(path, known, lambda words: _flags(words, current_names or {}), changed or {})


def _is_misspelt(key: str, known: str) -> bool:
    """True if a key has the words of a known one, each nearly as it is spelt there."""
    words, known_words = (re.split(r"[._-]", name) for name in (key, known))
    return len(words) == len(known_words) and all(
        difflib.SequenceMatcher(None, word, other).ratio() >= _SIMILAR
        for word, other in zip(words, known_words, strict=True)
    )


def read_changes(texts: Iterable[str]) -> dict[str, Any]:
    """The keys and values of `key=value` texts. Raises BadInput for a text of another form."""
    changes = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise BadInput(f"--set {limited(text)}: it is not a key with a value; write KEY=VALUE.")
        changes[key.strip().removeprefix("--").lstrip("+")] = _parse_scalar(value)
    return changes


_CommandKeys: TypeAlias = tuple[dict[str, Any], dict[str, str]]
"""The keys of a command with their values, and those that are undecided with the reason."""


def _override(config: TrainerConfig, changed: Mapping[str, Any]) -> TrainerConfig:
    """Override the values of some keys."""
    undecided = {key: reason for key, reason in config.undecided.items() if key not in changed}
    other_branch = {key: value for key, value in config.other_branch.items() if key not in changed}
    values = {**config.values, **changed}
    return replace(config, values=values, undecided=undecided, other_branch=other_branch, changed=frozenset(changed))


def _read_command(
    path: Path, known: KnownKeys, extract: Callable[[Sequence[Word]], _CommandKeys], changed: Mapping[str, Any]
) -> TrainerConfig:
    """Read the command that has the most keys of the trainer.

    The script is read twice, taking the last branch of each undecided condition and then the first, to find the keys
    that depend on a branch.
    """
    text = read_text(path, "configuration", MAX_YAML_BYTES)

    def with_most_keys(commands: Sequence[tuple[Word, ...]]) -> tuple[tuple[Word, ...], _CommandKeys]:
        candidates = [(command, extract(command)) for command in commands]
        return max(candidates, key=lambda candidate: sum(map(known.knows, candidate[1][0])), default=((), ({}, {})))

    script = read_script(text, path)
    commands = [command for command in script.commands if not _is_key(command[0])]
    command, (values, undecided) = with_most_keys(commands)
    first_branch = read_script(text, path, first=True).commands
    _, (first_branch_keys, _) = with_most_keys([command for command in first_branch if not _is_key(command[0])])
    num_other_keys = sum(
        known.knows(key)
        for command_words in commands
        if command_words is not command
        for key in extract(command_words)[0]
    )
    remarks = [*script.notes, *_undecided_words(command)]
    remarks += (
        f"{other[0].text} begins a command of its own, since a comment or the end of a line ends the one before it: no "
        "program gets its keys, and they are not read."
        for other in script.commands
        if _is_key(other[0]) and any(map(known.knows, extract((Word(""), *other))[0]))
    )
    if num_other_keys:
        remarks.append("the script runs several commands of the trainer: the one with the most keys is read.")
    config = TrainerConfig(
        known=known,
        values=values,
        other_branch={key: value for key, value in first_branch_keys.items() if values.get(key) != value},
        undecided=undecided,
        directory=path.parent,
        command=tuple(word.text for word in command),
        remarks=tuple(remarks),
    )
    return _override(_require_trainer_keys(path, config), changed)


def _is_key(word: Word) -> bool:
    """True if a word gives a key and cannot be the name of a program."""
    return word.text.startswith("--") or bool(_OVERRIDE.match(word.text))


def _undecided_words(command: Sequence[Word]) -> Iterator[str]:
    """Sentences on words that may expand to keys which are not known."""
    for before, word in pairwise((Word(""), *command)):
        is_value = before.text.startswith("--") and "=" not in before.text and not _ARRAY_EXPANSION.search(word.text)
        if word.reasons and _EXPANSION.match(word.text) and not is_value:
            yield f"{word.text} may give more keys, which are not known: {'; '.join(word.reasons)}."


def _overrides(command: Sequence[Word], known: KnownKeys) -> _CommandKeys:
    values: dict[str, Any] = {}
    undecided: dict[str, str] = {}
    for word in command:
        match = _OVERRIDE.match(word.text)
        tree = _json_tree(match[2]) if match and not word.reasons and known.has_keys_below(match[1]) else {}
        if match and tree:
            values |= _leaves(tree, match[1])
        elif match and (match[1] in known.keys or "." in match[1]):
            values[match[1]] = word.text.partition("=")[2] if word.reasons else _parse_scalar(match[2])
            undecided.pop(match[1], None)
            if word.reasons:
                undecided[match[1]] = "; ".join(word.reasons)
    return values, undecided


def _flags(command: Sequence[Word], current_names: Mapping[str, str]) -> _CommandKeys:
    values: dict[str, Any] = {}
    undecided: dict[str, str] = {}
    key: str | None = None
    program_index = max((index for index, word in enumerate(command) if _PROGRAM.search(word.text)), default=-1)
    for word in command[program_index + 1 :]:
        if word.text.startswith("--"):
            name, equals, text = word.text.removeprefix("--").partition("=")
            key = current_names.get(name, name)
            values[key] = (text if word.reasons else _parse_scalar(text)) if equals else True
            undecided.pop(key, None)
            if equals and word.reasons:
                undecided[key] = "; ".join(word.reasons)
            key = None if equals else key
        elif key is not None and word.reasons:
            if values[key] is True and not _ARRAY_EXPANSION.search(word.text):
                values[key], undecided[key] = word.text, "; ".join(word.reasons)
            key = None
        elif key is not None:
            value = _parse_scalar(word.text)
            if values[key] is True:
                values[key] = value
            elif _is_number(value) and (isinstance(values[key], list) or _is_number(values[key])):
                values[key] = [*(values[key] if isinstance(values[key], list) else [values[key]]), value]
            else:
                key = None
    return values, undecided


def _json_tree(text: str) -> dict[str, Any]:
    """The keys and values of a JSON object; empty for any other text."""
    try:
        tree = json.loads(text) if text.startswith("{") else {}
    except (ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_trainer_keys(path: Path, config: TrainerConfig) -> TrainerConfig:
    if not any(config.known.knows(key) for key in config.values):
        raise BadInput(
            f"configuration {path} has no key of {config.known.trainer} {config.known.version}; give the file that "
            "starts a run of it."
        )
    return config


def _read_leaves(path: Path, missing: list[str], read: list[Path]) -> dict[str, Any]:
    """Read the leaves of a YAML file; they override those of the base files beside it that its `defaults` name.

    The names of absent base files are appended to `missing`.
    """
    read.append(path)
    if len(read) > _MAX_FILES:
        raise BadInput(f"configuration {read[0]} builds on more than {_MAX_FILES} files; write it as one.")
    tree = yaml_value(read_text(path, "configuration", MAX_YAML_BYTES), f"configuration {path}")
    if not isinstance(tree, dict):
        raise BadInput(f"configuration {path} is not a mapping of keys; give the file that configures a run.")
    defaults = tree.pop("defaults", None)
    leaves: dict[str, Any] = {}
    for name in defaults if isinstance(defaults, list) else [defaults] if defaults else []:
        base = _base_file(path, name)
        if base is not None:
            leaves |= _read_leaves(base, missing, read)
        elif name != _SELF:
            missing.append(str(name))
    return leaves | dict(_leaves(tree))


def _base_file(path: Path, name: object) -> Path | None:
    """The file beside `path` that a name in its `defaults` refers to, with or without its suffix; None if absent."""
    files = (path.parent / f"{name}{ending}" for ending in ("", path.suffix))
    return next((file for file in files if isinstance(name, str) and file.is_file()), None)


def _leaves(tree: Mapping[str, Any], *keys: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, *keys, str(key))
        else:
            yield ".".join((*keys, str(key))), value


def _parse_scalar(text: str) -> Any:
    """Parse one word as a YAML scalar; return the word itself if it is not one."""
    if len(text) > _MAX_YAML_WORD:
        return text
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    if isinstance(value, str) and _EXPONENT_FLOAT.fullmatch(value):
        return float(value)
    is_text = isinstance(value, dict | list) or (isinstance(value, int) and ":" in text)  # YAML 1.1 reads 1:20 as 80
    return text if is_text or not isinstance(value, bool | int | float | str | None) else value


def _split_arguments(text: str) -> list[str]:
    """Split at the commas outside of braces."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _resolve_relative(key: str, target: str) -> str:
    """Resolve a reference with leading dots: one dot means beside the key, each further one a level up."""
    name = target.lstrip(".")
    above = key.split(".")[: -(len(target) - len(name))]
    return ".".join((*above, name))
