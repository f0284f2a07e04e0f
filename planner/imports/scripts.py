"""The words that a shell script gives its commands, with variables, arrays and arithmetic filled in.

Nothing is run. What a script computes otherwise, by a command or a loop, stays as it is written, and of branches all
lines count.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator

from meshwright.profiles.errors import BadInput
from meshwright.profiles.values import MOST_YAML_BYTES

_ASSIGNMENT = re.compile(r"^(?:export |local |readonly )?\s*([A-Za-z_]\w*)=(.*)$")
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::?-([^{}]*))?\}|\$([A-Za-z_]\w*)")
_ARRAY = re.compile(r"\"?\$\{([A-Za-z_]\w*)\[[@*]\]\}\"?")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")

_OPENS, _CLOSES = re.compile(r"^(if|case|for|while|until)\b"), re.compile(r"(^|;\s*)(fi|esac|done)\b")

_MOST_TIMES = 20
"""Variables in the values of variables are followed so deep."""


def words(text: str, *, first: bool = False) -> list[str]:
    """All words of a script in their order; raises BadInput where quotes do not end.

    Of a variable that several branches assign the last value counts, or with `first` the first.
    """
    variables: dict[str, str] = {}
    arrays: dict[str, list[str]] = {}
    found: list[str] = []
    depth = 0
    for line in _lines(text):
        depth += bool(_OPENS.match(line)) - bool(_CLOSES.search(line))
        array = re.match(r"^([A-Za-z_]\w*)=\((.*)\)\s*$", line, re.S)
        assignment = _ASSIGNMENT.match(line)
        given = array or assignment
        if given and first and depth > 0 and (given[1] in variables or given[1] in arrays):
            continue
        if array:
            arrays[array[1]] = _split(_filled(array[2], variables, arrays))
        elif assignment and "\n" not in line and len(_split(_filled(assignment[2], variables, arrays))) <= 1:
            variables[assignment[1]] = "".join(_split(_filled(assignment[2], variables, arrays)))
        else:
            found += _split(_filled(line, variables, arrays))
    return found


def _lines(text: str) -> Iterator[str]:
    """Logical lines: joined where one goes on behind a backslash, inside quotes or inside brackets of an array, without
    comments."""
    whole, quote = "", ""
    for line in text.replace("\\\n", " ").splitlines():
        bare = line if quote else re.sub(r"(^|\s)#.*$", "", line)
        whole = f"{whole} {bare}" if whole else bare
        quote = _quote_behind(bare, quote)
        if quote:
            continue
        if re.match(r"^\s*[A-Za-z_]\w*=\((?!\()", whole) and not re.search(r"\)\s*$", whole):
            continue
        if whole.strip():
            yield whole.strip()
        whole = ""
    if whole.strip():
        yield whole.strip()


def _quote_behind(line: str, quote: str) -> str:
    """The quote that is open behind a line, before which one may be; empty where none is."""
    is_escaped = False
    for character in line:
        if is_escaped:
            is_escaped = False
        elif character == "\\" and quote != "'":
            is_escaped = True
        elif quote and character == quote:
            quote = ""
        elif not quote and character in "'\"":
            quote = character
    return quote


def _filled(text: str, variables: dict[str, str], arrays: dict[str, list[str]]) -> str:
    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[2] if match[2] is not None else match[0])

    def computed(match: re.Match[str]) -> str:
        named = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[1])
        return _computed(named) or match[0]

    text = _ARRAY.sub(lambda match: shlex.join(arrays[match[1]]) if match[1] in arrays else "", text)
    for _ in range(_MOST_TIMES):
        filled = _ARITHMETIC.sub(computed, _VARIABLE.sub(value, text))
        if len(filled) > MOST_YAML_BYTES:
            raise BadInput("the script has variables that grow beyond reason when they are filled in; write them out.")
        if filled == text:
            break
        text = filled
    return text


def _computed(expression: str) -> str | None:
    """The number that an arithmetic expression comes to; None where it is none."""
    try:
        return str(_number(ast.parse(expression.strip().replace("/", "//"), mode="eval").body))
    except (SyntaxError, ArithmeticError, TypeError, ValueError, RecursionError, MemoryError):
        return None


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        one, other = _number(node.left), _number(node.right)
        for kind, result in ((ast.Add, one + other), (ast.Sub, one - other), (ast.Mult, one * other)):
            if isinstance(node.op, kind):
                return result
        if isinstance(node.op, ast.FloorDiv):
            return one // other
    raise TypeError(ast.dump(node))


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=False)
    except ValueError as error:
        raise BadInput(f"the script has a line that does not end: {error}; close its quotes.") from None
