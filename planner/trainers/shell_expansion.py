"""Expansion of the words of a shell script, arithmetic included, with the reasons why a word is undecided.

A variable that no line sets is unset, as in an empty environment: `${A:-x}` is x, while `$A` alone is undecided and
stays as written. The output of a command that is not evaluated is undecided too. Integers have 64 bits as in bash.
"""

from __future__ import annotations

import fnmatch
import operator as op
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from meshwright.profiles.errors import BadInput
from meshwright.profiles.untrusted_text import MAX_YAML_BYTES

_LANGUAGE = Language(tree_sitter_bash.language())
_BITS = 63
"""Bits of a signed 64-bit integer without its sign."""
_MAX_DEPTH = 32
_MAX_DIGITS = 20


def parse(text: str) -> Node:
    """The tree of a script."""
    return Parser(_LANGUAGE).parse(text.encode()).root_node


class Undecided(Exception):  # noqa: N818 - not an error: the caller handles it
    """Raised for a value that the script does not determine, with the reason."""


def evaluate_arithmetic(node: Node, text_of_name: Callable[[Node | str], str], depth: int = 0) -> int:
    """The value of an arithmetic expression. `text_of_name` gives the text of a name or an expansion.

    Raises Undecided for an expression with an unknown part, and for text that is not a number.
    """
    if depth > _MAX_DEPTH:
        raise Undecided("an expression is nested too deep")

    def value(part: Node | None) -> int:
        if part is None:
            raise Undecided("an expression is not complete")
        return evaluate_arithmetic(part, text_of_name, depth + 1)

    kind, source = node.type, (node.text or b"").decode(errors="replace")
    if kind in ("arithmetic_expansion", "parenthesized_expression", "compound_statement"):
        inner = [part for part in node.named_children if part.type != "comment"]
        return value(inner[-1] if inner else None)
    if kind == "binary_expression":
        sign = node.child_by_field_name("operator")
        return _apply(source, sign, value(node.child_by_field_name("left")), value(node.child_by_field_name("right")))
    if kind == "ternary_expression":
        part = "consequence" if value(node.child_by_field_name("condition")) else "alternative"
        return value(node.child_by_field_name(part))
    if kind == "unary_expression":
        inner_value = value(node.named_children[-1])
        sign_text = source[: 2 if source.startswith(("++", "--")) else 1]
        return {"-": -inner_value, "+": inner_value, "!": int(not inner_value), "~": ~inner_value}.get(
            sign_text, inner_value
        )
    if kind in ("number", "word", "variable_name"):
        return (
            _number(source, text_of_name, depth)
            if re.match(r"\d", source)
            else _variable_value(source, text_of_name, depth)
        )
    if kind in ("simple_expansion", "expansion", "command_substitution", "string", "raw_string", "concatenation"):
        return _number(text_of_name(node), text_of_name, depth)
    raise Undecided(f"$(({source})) is not computed")


def _variable_value(name: str, text_of_name: Callable[[Node | str], str], depth: int) -> int:
    return _number(text_of_name(name), text_of_name, depth)


def _number(text: str, text_of_name: Callable[[Node | str], str], depth: int) -> int:
    """The number in a text, or the value of the variable that it names."""
    stripped = text.strip()
    if stripped == "":
        return 0
    if len(stripped) <= _MAX_DIGITS and re.fullmatch(r"[+-]?(0[xX][0-9a-fA-F]+|\d+)", stripped):
        sign, digits = (-1 if stripped.startswith("-") else 1), stripped.lstrip("+-")
        base = 16 if digits[:2].lower() == "0x" else 8 if digits.startswith("0") and len(digits) > 1 else 10
        try:
            return sign * int(digits, base)
        except ValueError:
            raise Undecided(f"{stripped} is not a number") from None
    if stripped.isidentifier() and depth < _MAX_DEPTH:
        return _number(text_of_name(stripped), text_of_name, depth + 1)
    raise Undecided(f"{stripped[:40]} is not a whole number")


def _apply(source: str, operator: Node | None, left: int, right: int) -> int:
    name = (operator.text or b"").decode() if operator else ""
    if name in ("/", "%"):
        if right == 0:
            raise Undecided(f"{source} divides by 0")
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return quotient if name == "/" else left - quotient * right
    if name in ("**", "<<", ">>") and not 0 <= right <= _BITS:
        raise Undecided(f"{source} is beyond the 64-bit integers of a shell")
    if name not in _OPERATORS:
        raise Undecided(f"{source} is not computed")
    result = int(_OPERATORS[name](left, right))
    if abs(result) >= 2**_BITS:
        raise Undecided(f"{source} is beyond the 64-bit integers of a shell")
    return result


_OPERATORS: Mapping[str, Callable[[int, int], int]] = {
    "+": op.add,
    "-": op.sub,
    "*": op.mul,
    "**": op.pow,
    "<<": op.lshift,
    ">>": op.rshift,
    "&": op.and_,
    "|": op.or_,
    "^": op.xor,
    "==": op.eq,
    "!=": op.ne,
    "<": op.lt,
    "<=": op.le,
    ">": op.gt,
    ">=": op.ge,
    "&&": lambda left, right: bool(left and right),
    "||": lambda left, right: bool(left or right),
}


_ESCAPED = re.compile(r"\\(\n|.)", re.S)
_ESCAPED_IN_QUOTES = re.compile(r"\\([\n\"\\$`])")
_ARITHMETIC_DEFAULT = re.compile(r"\$\{\w+(?:\[[^\]]*\])?:?[-=+](.*\$\(\(.*)\}", re.S)
"""An expansion with a default in which there is arithmetic."""
_ANSI = {"n": "\n", "t": "\t", "r": "\r", "0": "\0"}
_ALL_ARGUMENTS = ("@", "*")
_LITERALS: Mapping[str, Callable[[str], str]] = {
    "raw_string": lambda text: text[1:-1],
    "ansi_c_string": lambda text: _ESCAPED.sub(lambda match: _ANSI.get(match[1], match[1]), text[2:-1]),
    "string_content": lambda text: _ESCAPED_IN_QUOTES.sub(_unescaped, text),
}
"""The text of nodes in which nothing is expanded, by the type of the node."""


@dataclass(frozen=True)
class Word:
    """An expanded word. `reasons` say why it is undecided. If unset variables are the only reason, `text_if_unset` is
    the text in which they are empty; otherwise it is None."""

    text: str
    reasons: tuple[str, ...] = ()
    text_if_unset: str | None = None

    @property
    def is_decided(self) -> bool:
        return not self.reasons

    @property
    def in_empty_environment(self) -> str | None:
        """The text with unset variables empty; None where something else is undecided."""
        return self.text if self.is_decided else self.text_if_unset

    def __add__(self, other: Word) -> Word:
        left, right = self.in_empty_environment, other.in_empty_environment
        unset = None if left is None or right is None else left + right
        reasons = tuple(dict.fromkeys((*self.reasons, *other.reasons)))
        text = self.text + other.text
        if len(text) > MAX_YAML_BYTES:
            raise BadInput("the script has variables that grow too long when they are expanded; write them out.")
        return Word(text, reasons, unset if reasons else None)


def undecided(text: str, reason: str) -> Word:
    """An undecided word, which stays as written."""
    return Word(text, (reason,))


@dataclass
class ShellVariables:
    """The variables and arrays that a script has set so far, and the arguments of the function that runs."""

    values: dict[str, Word] = field(default_factory=dict)
    arrays: dict[str, list[Word]] = field(default_factory=dict)
    arguments: list[Word] = field(default_factory=list)

    def copy(self) -> ShellVariables:
        return ShellVariables(
            dict(self.values), {name: list(elements) for name, elements in self.arrays.items()}, self.arguments
        )

    def get(self, name: str) -> Word | None:
        """The value of a variable, or the first element of an array; None where it is unset."""
        if name == "#":
            return Word(str(len(self.arguments)))
        if name.isdigit() and name != "0":
            index = int(name) - 1
            return self.arguments[index] if index < len(self.arguments) else None
        if name in self.arrays:
            return self.arrays[name][0] if self.arrays[name] else Word("")
        return self.values.get(name)

    def elements(self, name: str) -> list[Word] | None:
        """The elements of an array; None where it is unset."""
        if name in _ALL_ARGUMENTS:
            return self.arguments
        if name in self.arrays:
            return self.arrays[name]
        return [self.values[name]] if name in self.values else None


@dataclass(frozen=True)
class Expander:
    """Expands the nodes of a script into words. `command_output` gives the output of a command substitution."""

    variables: ShellVariables
    command_output: Callable[[Node], Word]

    def fields(self, node: Node) -> list[Word]:
        """The words that a node expands to in a command: none for an empty array, one for each element of an array."""
        if node.type in ("concatenation", "command_name"):
            return _join_adjacent(self.fields(part) for part in _word_parts(node))
        if node.type == "string":
            return self._quoted(node)
        if node.type in ("simple_expansion", "expansion"):
            elements = self._elements(node)
            if elements is not None:
                return [part for element in elements for part in _split(element)]
            return _split(self._expand(node))
        if node.type == "command_substitution":
            return _split(self.command_output(node))
        return [self.word(node)]

    def word(self, node: Node) -> Word:
        """The one word that a node expands to where nothing is split, as in an assignment."""
        kind, text = node.type, text_of(node)
        if kind in _LITERALS:
            return Word(_LITERALS[kind](text))
        if kind in ("string", "translated_string", "heredoc_body"):
            return _join_with_spaces(self._quoted(node))
        if kind in ("simple_expansion", "expansion"):
            elements = self._elements(node)
            return self._expand(node) if elements is None else _join_with_spaces(elements)
        if kind in ("command_substitution", "arithmetic_expansion"):
            return self.command_output(node) if kind == "command_substitution" else self.number(node)
        if kind in ("concatenation", "command_name"):
            return _join_with_spaces(_join_adjacent([self.word(part)] for part in _word_parts(node)))
        is_output = kind == "process_substitution"
        return Word(_ESCAPED.sub(_unescaped, text), (f"{text} is the output of a command",) if is_output else ())

    def number(self, node: Node) -> Word:
        """The value of an arithmetic expression, as a word."""
        try:
            return Word(str(evaluate_arithmetic(node, self._number_text)))
        except Undecided as error:
            return undecided(text_of(node), str(error))

    def _number_text(self, node: Node | str) -> str:
        """The text of a name or an expansion inside an arithmetic expression."""
        if isinstance(node, str):
            value = self.variables.get(node)
            if value is None:
                raise Undecided(f"{node} is set by no line of the script")
        else:
            value = self.word(node)
        if value.reasons:
            raise Undecided("; ".join(value.reasons))
        return value.text

    def _quoted(self, node: Node) -> list[Word]:
        """The words of a string in double quotes; only arrays make several."""
        words = [Word("")]
        pieces = list(_quoted_parts(node))
        for piece in pieces:
            if isinstance(piece, str):
                expanded = [Word(_ESCAPED_IN_QUOTES.sub(_unescaped, piece))]
            else:
                elements = self._elements(piece) if piece.type.endswith("expansion") else None
                expanded = [self.word(piece)] if elements is None else elements
                if len(pieces) == 1 and elements is not None and not _joins_elements(piece):
                    return expanded
                expanded = (
                    [_join_with_spaces(expanded)] if elements is not None and _joins_elements(piece) else expanded
                )
            if expanded:
                words[-1] += expanded[0]
                words += expanded[1:]
        return words

    def _elements(self, node: Node) -> list[Word] | None:
        """The elements of `${A[@]}`, `$@` and the like; None for any other expansion."""
        text = text_of(node)
        match = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}|\$\{?([@*])\}?", text)
        if match is None:
            return None
        name = match[1] or match[2]
        elements = self.variables.elements(name)
        return [_unset(text, name)] if elements is None else elements

    def _expand(self, node: Node) -> Word:
        text = text_of(node)
        name, operator, arguments = _expansion(node)
        if operator == "!" or not name:
            return undecided(text, f"{text} is not computed")
        if operator == "#" and not arguments:
            return self._length(node, name, text)
        value = self._variable(node, name)
        if operator in (":-", "-", ":=", "=", ":+", "+"):
            return self._apply_default(name, operator, arguments, value, text)
        if value is None:
            return _unset(text, name)
        return (
            value if not operator or operator in (":?", "?") else self._apply_operator(value, operator, arguments, text)
        )

    def _variable(self, node: Node, name: str) -> Word | None:
        subscript = next((part for part in node.named_children if part.type == "subscript"), None)
        if subscript is None:
            return self.variables.get(name)
        index, elements = subscript.child_by_field_name("index"), self.variables.elements(name)
        if elements is None or index is None:
            return None
        position = self.number(index)
        if position.reasons:
            return undecided(text_of(node), position.reasons[0])
        return elements[int(position.text)] if -len(elements) <= int(position.text) < len(elements) else None

    def _length(self, node: Node, name: str, text: str) -> Word:
        if any(part.type == "subscript" for part in node.named_children):
            elements = self.variables.elements(name)
            return Word(str(len(elements or ())))
        value = self.variables.get(name)
        plain = "" if value is None else value.in_empty_environment
        return undecided(text, value.reasons[0]) if value and plain is None else Word(str(len(plain or "")))

    def _apply_default(self, name: str, operator: str, arguments: list[Node], value: Word | None, text: str) -> Word:
        alone = arithmetic_default(text)
        default = self.word(alone) if alone else self._joined(arguments)
        plain = None if value is None else value.in_empty_environment
        if value is not None and plain is None:
            return undecided(text, value.reasons[0])
        is_set = bool(plain) if operator.startswith(":") else plain is not None
        if operator.endswith("+"):
            return default if is_set else Word("")
        if is_set and value is not None:
            return value
        if operator.endswith("="):
            self.variables.values[name] = default
        return default

    def _joined(self, nodes: Iterable[Node]) -> Word:
        return _join_with_spaces(_join_adjacent([self.word(node)] for node in nodes))

    def _apply_operator(self, value: Word, operator: str, arguments: list[Node], text: str) -> Word:
        """Apply an operator: change the case, remove or replace a pattern, or take a substring."""
        if value.reasons:
            return undecided(text, value.reasons[0])
        operands = [self.word(word) for word in arguments]
        if any(word.reasons for word in operands):
            return undecided(text, next(word.reasons[0] for word in operands if word.reasons))
        change = _EXPANSION_OPERATORS.get(operator)
        changed = change(value.text, [word.text for word in operands]) if change else None
        return undecided(text, f"{text} is not computed") if changed is None else Word(changed)


def arithmetic_default(text: str) -> Node | None:
    """The default of an expansion such as `${A:-$((B + 1))}`, parsed alone; None for one without arithmetic.

    Within an expansion the parser takes arithmetic for a command, or reports an error.
    """
    match = _ARITHMETIC_DEFAULT.fullmatch(text)
    statements = parse(f"x={match[1]}").named_children if match else []
    value = statements[0].child_by_field_name("value") if len(statements) == 1 else None
    return value if match and value is not None and text_of(value) == match[1] else None


def text_of(node: Node) -> str:
    """The source text of a node."""
    return (node.text or b"").decode(errors="replace")


def _unset(text: str, name: str) -> Word:
    what = (
        f"argument {name} of the script is not given" if name.isdigit() else f"{name} is set by no line of the script"
    )
    return Word(text, (what,), "")


def _unescaped(match: re.Match[str]) -> str:
    return "" if match[1] == "\n" else match[1]


def _word_parts(node: Node) -> Iterator[Node]:
    return (part for part in node.children if part.type not in ("heredoc_start", "heredoc_end"))


def _quoted_parts(node: Node) -> Iterator[Node | str]:
    """The expansions in a quoted string or a here-document, and the text between them."""
    text, start, is_quoted = node.text or b"", node.start_byte, node.type != "heredoc_body"
    position = (2 if text.startswith(b'$"') else 1) if is_quoted else 0
    for part in node.named_children:
        if part.type in ("string_content", "heredoc_content"):
            continue
        between = text[position : part.start_byte - start].decode(errors="replace")
        if between:
            yield between
        yield part
        position = part.end_byte - start
    if last := text[position : -1 if is_quoted else None].decode(errors="replace"):
        yield last


def _joins_elements(node: Node) -> bool:
    return "*" in text_of(node)


def _join_adjacent(parts: Iterable[list[Word]]) -> list[Word]:
    """Join the words of adjacent parts: the last word of one part and the first of the next become one."""
    words: list[Word] = []
    for fields in parts:
        if fields and words:
            words[-1] += fields[0]
            words += fields[1:]
        else:
            words += fields
    return words


def _join_with_spaces(fields: list[Word]) -> Word:
    joined = fields[0] if fields else Word("")
    for word in fields[1:]:
        joined = joined + Word(" ") + word
    return joined


def _split(word: Word) -> list[Word]:
    """Split an unquoted value into words."""
    return [word] if word.reasons else [Word(part) for part in word.text.split()]


def _expansion(node: Node) -> tuple[str, str, list[Node]]:
    """The name, the operator and its arguments in `$A` and `${A:-x}`."""
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


def _remove_match(value: str, pattern: str, *, at_end: bool, longest: bool) -> str:
    """Remove the shortest or longest match of a pattern from the start or the end of a value."""
    lengths = range(len(value) + 1)
    for length in reversed(lengths) if longest else lengths:
        part = value[len(value) - length :] if at_end else value[:length]
        if fnmatch.fnmatchcase(part, pattern):
            return value[: len(value) - length] if at_end else value[length:]
    return value


def _replaced(value: str, operands: list[str], count: int) -> str | None:
    """The value with up to `count` matches replaced (-1 is all); None for a pattern that is not plain text."""
    pattern, new = (*operands, "", "")[:2]
    if not pattern or any(character in pattern for character in "*?[\\"):
        return None
    return value.replace(pattern, new, count)


def _sliced(value: str, operands: list[str]) -> str | None:
    """The substring at an offset, with a length if there are two operands; None for operands that are not numbers."""
    if not operands or not all(re.fullmatch(r"-?\d{1,9}", operand.strip()) for operand in operands):
        return None
    first = int(operands[0])
    last = None if len(operands) < 2 else int(operands[1])
    return value[first:] if last is None else value[first:last] if last < 0 else value[first:][:last]


_ExpansionOperator = Callable[[str, list[str]], str | None]
_EXPANSION_OPERATORS: Mapping[str, _ExpansionOperator] = {
    ",,": lambda value, _operands: value.lower(),
    "^^": lambda value, _operands: value.upper(),
    ",": lambda value, _operands: value[:1].lower() + value[1:],
    "^": lambda value, _operands: value[:1].upper() + value[1:],
    "#": lambda value, operands: _remove_match(value, "".join(operands), at_end=False, longest=False),
    "##": lambda value, operands: _remove_match(value, "".join(operands), at_end=False, longest=True),
    "%": lambda value, operands: _remove_match(value, "".join(operands), at_end=True, longest=False),
    "%%": lambda value, operands: _remove_match(value, "".join(operands), at_end=True, longest=True),
    "/": lambda value, operands: _replaced(value, operands, 1),
    "//": lambda value, operands: _replaced(value, operands, -1),
    ":": _sliced,
}
