"""Words of a shell script: what an expansion comes to, and by what a word is undecided.

A variable that no line sets is unset, as in an empty environment: `${A:-x}` is x, and `$A` by itself is undecided and
stays as it is written. The answer of a command that is not computed here is undecided too.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tree_sitter import Node

from meshwright.planner.imports.shell_arithmetic import Undecided, whole_value
from meshwright.profiles.errors import BadInput
from meshwright.profiles.values import MOST_YAML_BYTES

_ESCAPED = re.compile(r"\\(\n|.)", re.S)
_ESCAPED_IN_QUOTES = re.compile(r"\\([\n\"\\$`])")
_ANSI = {"n": "\n", "t": "\t", "r": "\r", "0": "\0"}
_ALL = ("@", "*")
_LITERALS: Mapping[str, Callable[[str], str]] = {
    "raw_string": lambda text: text[1:-1],
    "ansi_c_string": lambda text: _ESCAPED.sub(lambda match: _ANSI.get(match[1], match[1]), text[2:-1]),
    "string_content": lambda text: _ESCAPED_IN_QUOTES.sub(_unescaped, text),
}
"""Texts in which nothing is expanded, by the kind of their node."""


@dataclass(frozen=True)
class Word:
    """A text as it is read. `reasons` say what leaves it undecided; `unset` is the text that it has where all of that
    are variables which nothing sets, and None where something else is undecided."""

    text: str
    reasons: tuple[str, ...] = ()
    unset: str | None = None

    @property
    def is_decided(self) -> bool:
        return not self.reasons

    @property
    def in_empty_environment(self) -> str | None:
        """The text where variables that nothing sets are empty; None for one that something else leaves undecided."""
        return self.text if self.is_decided else self.unset

    def __add__(self, other: Word) -> Word:
        one, two = self.in_empty_environment, other.in_empty_environment
        unset = None if one is None or two is None else one + two
        reasons = tuple(dict.fromkeys((*self.reasons, *other.reasons)))
        text = self.text + other.text
        if len(text) > MOST_YAML_BYTES:
            raise BadInput("the script has variables that grow beyond reason when they are filled in; write them out.")
        return Word(text, reasons, unset if reasons else None)


def undecided(text: str, reason: str) -> Word:
    """A word that stays as it is written."""
    return Word(text, (reason,))


@dataclass
class ShellVariables:
    """What a script has set so far: variables, arrays, and the arguments of the function that runs."""

    values: dict[str, Word] = field(default_factory=dict)
    arrays: dict[str, list[Word]] = field(default_factory=dict)
    arguments: list[Word] = field(default_factory=list)

    def copy(self) -> ShellVariables:
        return ShellVariables(
            dict(self.values), {name: list(all_) for name, all_ in self.arrays.items()}, self.arguments
        )

    def of(self, name: str) -> Word | None:
        """The value of a variable, the first of an array; None where nothing sets it."""
        if name == "#":
            return Word(str(len(self.arguments)))
        if name.isdigit() and name != "0":
            place = int(name) - 1
            return self.arguments[place] if place < len(self.arguments) else None
        if name in self.arrays:
            return self.arrays[name][0] if self.arrays[name] else Word("")
        return self.values.get(name)

    def all_of(self, name: str) -> list[Word] | None:
        """The elements of an array; None where nothing sets it."""
        if name in _ALL:
            return self.arguments
        if name in self.arrays:
            return self.arrays[name]
        return [self.values[name]] if name in self.values else None


@dataclass(frozen=True)
class Expander:
    """Fields of the nodes of a script. `answer` gives what a command substitution answers."""

    variables: ShellVariables
    answer: Callable[[Node], Word]

    def fields(self, node: Node) -> list[Word]:
        """The words that a node is to a command: none for an unset array, several for one with several elements."""
        if node.type in ("concatenation", "command_name"):
            return _joined(self.fields(part) for part in _parts(node))
        if node.type == "string":
            return self._quoted(node)
        if node.type in ("simple_expansion", "expansion"):
            elements = self._elements(node)
            if elements is not None:
                return [field for one in elements for field in _split(one)]
            return _split(self._expanded(node))
        if node.type == "command_substitution":
            return _split(self.answer(node))
        return [self.word(node)]

    def word(self, node: Node) -> Word:
        """The one word that a node is where nothing is split, as in an assignment."""
        kind, text = node.type, text_of(node)
        if kind in _LITERALS:
            return Word(_LITERALS[kind](text))
        if kind in ("string", "translated_string", "heredoc_body"):
            return _one(self._quoted(node))
        if kind in ("simple_expansion", "expansion"):
            elements = self._elements(node)
            return self._expanded(node) if elements is None else _one(elements)
        if kind in ("command_substitution", "arithmetic_expansion"):
            return self.answer(node) if kind == "command_substitution" else self.number(node)
        if kind in ("concatenation", "command_name"):
            return _one(_joined([self.word(part)] for part in _parts(node)))
        is_answer = kind == "process_substitution"
        return Word(_ESCAPED.sub(_unescaped, text), (f"{text} is what a command answers",) if is_answer else ())

    def number(self, node: Node) -> Word:
        """What an arithmetic expression comes to."""
        try:
            return Word(str(whole_value(node, self._number_text)))
        except Undecided as error:
            return undecided(text_of(node), str(error))

    def _number_text(self, node: Node | str) -> str:
        """The text that a name or an expansion inside an arithmetic expression stands for."""
        if isinstance(node, str):
            found = self.variables.of(node)
            if found is None:
                raise Undecided(f"{node} is set by no line of the script")
        else:
            found = self.word(node)
        if found.reasons:
            raise Undecided("; ".join(found.reasons))
        return found.text

    def _quoted(self, node: Node) -> list[Word]:
        """A string in double quotes, of which arrays alone make several fields."""
        found = [Word("")]
        pieces = list(_pieces(node))
        for piece in pieces:
            if isinstance(piece, str):
                fields = [Word(_ESCAPED_IN_QUOTES.sub(_unescaped, piece))]
            else:
                elements = self._elements(piece) if piece.type.endswith("expansion") else None
                fields = [self.word(piece)] if elements is None else elements
                if len(pieces) == 1 and elements is not None and not _joins(piece):
                    return fields
                fields = [_one(fields)] if elements is not None and _joins(piece) else fields
            if fields:
                found[-1] += fields[0]
                found += fields[1:]
        return found

    def _elements(self, node: Node) -> list[Word] | None:
        """Gives the elements of `${A[@]}`, `$@` and the like; None for what is no such."""
        text = text_of(node)
        match = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}|\$\{?([@*])\}?", text)
        if match is None:
            return None
        name = match[1] or match[2]
        found = self.variables.all_of(name)
        return [_of_unset(text, name)] if found is None else found

    def _expanded(self, node: Node) -> Word:
        text = text_of(node)
        name, operator, arguments = _expansion(node)
        if operator == "!" or not name:
            return undecided(text, f"{text} is not computed")
        if operator == "#" and not arguments:
            return self._length(node, name, text)
        found = self._value(node, name)
        if operator in (":-", "-", ":=", "=", ":+", "+"):
            return self._with_default(name, operator, arguments, found, text)
        if found is None:
            return _of_unset(text, name)
        return found if not operator or operator in (":?", "?") else self._changed(found, operator, arguments, text)

    def _value(self, node: Node, name: str) -> Word | None:
        subscript = next((part for part in node.named_children if part.type == "subscript"), None)
        if subscript is None:
            return self.variables.of(name)
        index, elements = subscript.child_by_field_name("index"), self.variables.all_of(name)
        if elements is None or index is None:
            return None
        place = self.number(index)
        if place.reasons:
            return undecided(text_of(node), place.reasons[0])
        return elements[int(place.text)] if -len(elements) <= int(place.text) < len(elements) else None

    def _length(self, node: Node, name: str, text: str) -> Word:
        if any(part.type == "subscript" for part in node.named_children):
            elements = self.variables.all_of(name)
            return Word(str(len(elements or ())))
        found = self.variables.of(name)
        plain = "" if found is None else found.in_empty_environment
        return undecided(text, found.reasons[0]) if found and plain is None else Word(str(len(plain or "")))

    def _with_default(self, name: str, operator: str, arguments: list[Node], found: Word | None, text: str) -> Word:
        default = _one(_joined([self.word(one)] for one in arguments))
        plain = None if found is None else found.in_empty_environment
        if found is not None and plain is None:
            return undecided(text, found.reasons[0])
        is_there = bool(plain) if operator.startswith(":") else plain is not None
        if operator.endswith("+"):
            return default if is_there else Word("")
        if is_there and found is not None:
            return found
        if operator.endswith("="):
            self.variables.values[name] = default
        return default

    def _changed(self, found: Word, operator: str, arguments: list[Node], text: str) -> Word:
        """A value with its case changed, a pattern cut off or replaced, or a part of it."""
        if found.reasons:
            return undecided(text, found.reasons[0])
        told = [self.word(one) for one in arguments]
        if any(one.reasons for one in told):
            return undecided(text, next(one.reasons[0] for one in told if one.reasons))
        change = _CHANGES.get(operator)
        changed = change(found.text, [one.text for one in told]) if change else None
        return undecided(text, f"{text} is not computed") if changed is None else Word(changed)


def text_of(node: Node) -> str:
    """A node as it is written."""
    return (node.text or b"").decode(errors="replace")


def _of_unset(text: str, name: str) -> Word:
    what = (
        f"argument {name} of the script is not given" if name.isdigit() else f"{name} is set by no line of the script"
    )
    return Word(text, (what,), "")


def _unescaped(match: re.Match[str]) -> str:
    return "" if match[1] == "\n" else match[1]


def _parts(node: Node) -> Iterator[Node]:
    return (part for part in node.children if part.type not in ("heredoc_start", "heredoc_end"))


def _pieces(node: Node) -> Iterator[Node | str]:
    """The expansions in a quoted string or a here-document, and the texts between them."""
    text, start, is_quoted = node.text or b"", node.start_byte, node.type != "heredoc_body"
    place = (2 if text.startswith(b'$"') else 1) if is_quoted else 0
    for part in node.named_children:
        if part.type in ("string_content", "heredoc_content"):
            continue
        between = text[place : part.start_byte - start].decode(errors="replace")
        if between:
            yield between
        yield part
        place = part.end_byte - start
    if last := text[place : -1 if is_quoted else None].decode(errors="replace"):
        yield last


def _joins(node: Node) -> bool:
    return "*" in text_of(node)


def _joined(parts: Iterable[list[Word]]) -> list[Word]:
    """Fields of parts that are written without a space between them."""
    found: list[Word] = []
    for fields in parts:
        if fields and found:
            found[-1] += fields[0]
            found += fields[1:]
        else:
            found += fields
    return found


def _one(fields: list[Word]) -> Word:
    found = fields[0] if fields else Word("")
    for one in fields[1:]:
        found = found + Word(" ") + one
    return found


def _split(word: Word) -> list[Word]:
    """The fields of a value without quotes around it."""
    return [word] if word.reasons else [Word(part) for part in word.text.split()]


def _expansion(node: Node) -> tuple[str, str, list[Node]]:
    """The name, the operator and what stands behind it, of `$A` and `${A:-x}`."""
    name, operator, arguments = "", "", []
    for part in node.children:
        if part.type in ("variable_name", "special_variable_name") and not name:
            name = text_of(part)
        elif part.type == "subscript" and not name:
            named = part.child_by_field_name("name")
            name = text_of(named) if named else ""
        elif node.field_name_for_child(node.children.index(part)) == "operator":
            operator = operator or text_of(part)
        elif part.type not in ("${", "}", "$") and name:
            arguments.append(part)
    return name, operator, arguments


def _cut(value: str, pattern: str, *, behind: bool, longest: bool) -> str:
    """A value without what a pattern matches in front or behind."""
    lengths = range(len(value) + 1)
    for length in reversed(lengths) if longest else lengths:
        part = value[len(value) - length :] if behind else value[:length]
        if fnmatch.fnmatchcase(part, pattern):
            return value[: len(value) - length] if behind else value[length:]
    return value


def _replaced(value: str, told: list[str], count: int) -> str | None:
    pattern, new = (*told, "", "")[:2]
    if not pattern or any(character in pattern for character in "*?[\\"):
        return None
    return value.replace(pattern, new, count)


def _sliced(value: str, told: list[str]) -> str | None:
    if not told or not all(re.fullmatch(r"-?\d{1,9}", one.strip()) for one in told):
        return None
    first = int(told[0])
    last = None if len(told) < 2 else int(told[1])
    return value[first:] if last is None else value[first:last] if last < 0 else value[first:][:last]


_Change = Callable[[str, list[str]], str | None]
_CHANGES: Mapping[str, _Change] = {
    ",,": lambda value, _told: value.lower(),
    "^^": lambda value, _told: value.upper(),
    ",": lambda value, _told: value[:1].lower() + value[1:],
    "^": lambda value, _told: value[:1].upper() + value[1:],
    "#": lambda value, told: _cut(value, "".join(told), behind=False, longest=False),
    "##": lambda value, told: _cut(value, "".join(told), behind=False, longest=True),
    "%": lambda value, told: _cut(value, "".join(told), behind=True, longest=False),
    "%%": lambda value, told: _cut(value, "".join(told), behind=True, longest=True),
    "/": lambda value, told: _replaced(value, told, 1),
    "//": lambda value, told: _replaced(value, told, -1),
    ":": _sliced,
}
