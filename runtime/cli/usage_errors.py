"""A wrong command line as one sentence: the option, the value, the rule, and what to give instead."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from typer.exceptions import TyperException

from meshwright.profiles.errors import suggestion

_LIMITS = {"greater_than_equal": ("ge", "or more"), "less_than_equal": ("le", "at most")}
"""For each error of a range, the key of its limit and the words after the limit."""


def usage_sentence(error: TyperException, commands: Sequence[str], words: Sequence[str] = ()) -> str:
    """Return a usage error as one sentence that ends with what to give, with known values, or with the help to read.

    `words` are those of the command line; the help is that of the command among them if the error names none.
    """
    if isinstance(error.__cause__, ValidationError):
        detail = error.__cause__.errors()[0]
        if rule := _broken_rule(detail):
            return f"{_name_of_parameter(error)} {_quoted(detail['input'])} {rule}"
    message = " ".join(error.format_message().split()).rstrip(".")
    if unknown := re.match(r"No such command '(.*?)'", message):
        return f"there is no command {unknown[1]!r}; {suggestion(unknown[1], commands)}"
    context = getattr(error, "ctx", None)
    named = next((f"meshwright {word}" for word in words if word in commands), "meshwright")
    path = context.command_path if context and " " in context.command_path else named
    return f"{message[:1].lower()}{message[1:]}; see `{path} --help`."


def _broken_rule(detail: ErrorDetails) -> str:
    """Return the rule that a value breaks and what to give instead; empty for an error of another kind."""
    kind, value = detail["type"], str(detail["input"])
    if kind in ("int_parsing", "int_from_float"):
        return "is not a whole number; write one in digits."
    if kind == "float_parsing":
        return "is not a number; write one, such as 0.5."
    if kind in _LIMITS:
        if not math.isfinite(float(value)):
            return "is not a finite number; give one."
        key, words = _LIMITS[kind]
        limit = detail["ctx"][key]
        return f"is out of range; give {int(limit) if float(limit).is_integer() else format(limit, '.9g')} {words}."
    if kind == "value_error":
        choices = re.findall(r"'(.*?)'", str(detail["ctx"]["error"]).partition(" is not one of ")[2])
        return f"is not known; {suggestion(value.lower(), choices)}" if choices else ""
    return ""


def _name_of_parameter(error: TyperException) -> str:
    parameter = getattr(error, "param", None)
    options: list[str] = getattr(parameter, "opts", [])
    return max(options, key=len) if getattr(parameter, "param_type_name", "") == "option" else "argument"


def _quoted(value: object) -> str:
    """Return a number as it was given, and any other text in quotes."""
    return str(value) if re.fullmatch(r"[-+.\w]*\d[-+.\w]*|-?inf|nan", str(value)) else repr(value)
