"""An evaluator of shell scripts: the words of the commands that a script runs, without running any program.

tree-sitter-bash parses the script; assignments, arrays, expansions, arithmetic, conditions, `case`, loops and functions
are evaluated. A condition on files or on the output of a program is undecided, and so is a word that contains such
output; both are reported.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tree_sitter import Node

from meshwright.planner.trainers.shell_conditions import ShellConditions
from meshwright.planner.trainers.shell_expansion import (
    Expander,
    ShellVariables,
    Word,
    arithmetic_default,
    parse,
    text_of,
    undecided,
)
from meshwright.profiles.errors import BadInput
from meshwright.profiles.untrusted_text import MAX_YAML_BYTES, read_text

_SHELLS = ("bash", "sh", "/bin/bash", "/bin/sh", "zsh")
_IGNORED = ("echo", "printf", "cat", ":", "true", "false", "set", "shopt", "trap", "sleep", "mkdir", "wait", "local")
"""Commands whose words never configure a trainer."""

_OTHER_DEVICE = re.compile(r"^python3? -c .*\bimport torch_npu\b|^npu-smi\b")
"""Commands that look for NPUs. They are assumed to fail, since no plan is for such devices."""

_MAX_STATEMENTS = 20_000
_MAX_ITERATIONS = 64
_LIST_OPERANDS = 2
"""Number of operands of `&&` or `||`, which tree-sitter calls a list."""

_MAX_DEPTH = 24
_MAX_QUOTED = 80
"""Characters of a quoted statement in a note."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """The words of every command that a script runs, in order, and sentences on what is undecided."""

    commands: tuple[tuple[Word, ...], ...]
    notes: tuple[str, ...] = ()


def read_script(text: str, path: Path | None = None, *, first: bool = False) -> Script:
    """Evaluate a script that is started without arguments in an empty environment.

    Files that it sources are looked up beside `path`. The last branch of an undecided condition is taken, or with
    `first` the first. Raises BadInput for an unclosed quote, and for a script that runs or nests too long.
    """
    shell = _Shell(path=path, first=first)
    try:
        shell.run_text(text)
    except _ScriptEnd:
        pass
    except RecursionError:
        raise BadInput("the script is nested too deep to be read; write the command out.") from None
    return Script(commands=tuple(shell.commands), notes=tuple(dict.fromkeys(shell.notes)))


def words(text: str, *, first: bool = False) -> list[str]:
    """All words of the commands of a script, in order; see `read_script`."""
    return [word.text for command in read_script(text, first=first).commands for word in command]


class _ScriptEnd(Exception):  # noqa: N818 - the normal end of a script
    """Raised where the script ends."""


@dataclass(kw_only=True)
class _Shell:
    """A shell in the middle of a script: what was set, run and left undecided so far.

    `first` takes the first branch of an undecided condition instead of the last; `printed` collects the output inside a
    command substitution.
    """

    path: Path | None
    first: bool
    variables: ShellVariables = field(default_factory=ShellVariables)
    functions: dict[str, Node] = field(default_factory=dict)
    commands: list[tuple[Word, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    directory: str | None = None
    printed: list[str] | None = None
    depth: int = 0
    statements: int = 0

    def __post_init__(self) -> None:
        if self.path is not None and "0" not in self.variables.values:
            name = Word(str(self.path))
            self.variables.values |= {"0": name, "BASH_SOURCE": name}

    @property
    def _expander(self) -> Expander:
        return Expander(self.variables, self._substitute)

    @property
    def _conditions(self) -> ShellConditions:
        return ShellConditions(self._expander, self._succeeds)

    def run_text(self, text: str) -> None:
        """Evaluate a text as a script. Raises BadInput for an unclosed quote."""
        root = parse(text)
        self._require_closed(root)
        self._nested(lambda: self._run_all(root.children))

    def _require_closed(self, root: Node) -> None:
        for node in _parse_errors(root):
            line = node.start_point[0] + 1
            if text_of(node).lstrip()[:1] in ("'", '"') or node.type in ('"', "'"):
                raise BadInput(f"the script has an unclosed quote in line {line}; close it.")
            self.notes.append(f"line {line} of the script cannot be parsed: {_quoted(node)}")

    def _nested(self, act: Callable[[], None]) -> None:
        if self.depth >= _MAX_DEPTH:
            raise BadInput(f"the script calls itself more than {_MAX_DEPTH} deep; write the command out.")
        self.depth += 1
        try:
            act()
        finally:
            self.depth -= 1

    def _run_all(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self._run(node)

    def _run(self, node: Node) -> None:
        self.statements += 1
        if self.statements > _MAX_STATEMENTS:
            raise BadInput(f"the script runs more than {_MAX_STATEMENTS} statements; write the command out.")
        act = _STATEMENTS.get(node.type)
        if act is not None:
            act(self, node)

    def body(self, node: Node) -> None:
        """Run all statements of a group."""
        self._run_all(node.named_children)

    def subshell(self, node: Node) -> None:
        """Run a group in a subshell, whose variables end with it."""
        shell = self._fork()
        shell.body(node)

    def _fork(self, printed: list[str] | None = None) -> _Shell:
        shell = replace(self, variables=self.variables.copy(), functions=dict(self.functions), depth=self.depth + 1)
        shell.printed = self.printed if printed is None else printed
        if shell.depth > _MAX_DEPTH:
            raise BadInput(f"the script nests more than {_MAX_DEPTH} deep; write the command out.")
        return shell

    def assign(self, node: Node) -> None:
        """Run `A=x`, `A+=x`, `A=(x y)`, `A+=(x y)` and `A[1]=x`."""
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if target is None:
            return
        appends = any(part.type == "+=" for part in node.children)
        if target.type == "subscript":
            self._assign_element(target, value)
            return
        name = text_of(target)
        if value is not None and value.type == "array":
            elements = [word for element in value.named_children for word in self._words(element)]
            before = self.variables.elements(name) or [] if appends else []
            self.variables.arrays[name] = [*before, *elements]
            self.variables.values.pop(name, None)
            return
        word = Word("") if value is None else self._expander.word(value)
        before_word = self.variables.get(name)
        self.variables.values[name] = before_word + word if appends and before_word is not None else word
        self.variables.arrays.pop(name, None)

    def _assign_element(self, target: Node, value: Node | None) -> None:
        name_node, index = target.child_by_field_name("name"), target.child_by_field_name("index")
        if name_node is None or index is None or value is None:
            return
        elements = self.variables.arrays.setdefault(text_of(name_node), [])
        position = self._expander.number(index)
        if position.is_decided and 0 <= int(position.text) <= len(elements):
            elements[int(position.text) : int(position.text) + 1] = [self._expander.word(value)]

    def _words(self, node: Node) -> list[Word]:
        return [] if node.type == "comment" else self._expander.fields(node)

    def declare(self, node: Node) -> None:
        """Run `export A=x`, `local A=x` and the like."""
        self._run_all(part for part in node.named_children if part.type == "variable_assignment")

    def unset(self, node: Node) -> None:
        for part in node.named_children:
            self.variables.values.pop(text_of(part), None)
            self.variables.arrays.pop(text_of(part), None)

    def define(self, node: Node) -> None:
        """Record a function by its name."""
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self.functions[text_of(name)] = body

    def redirected(self, node: Node) -> None:
        """Run a command whose input or output is redirected, from a here-document or a file."""
        body = node.child_by_field_name("body")
        heredoc = next((part for part in node.named_children if part.type == "heredoc_redirect"), None)
        if body is not None and body.type == "command" and heredoc is not None:
            self._command(body, self._heredoc(heredoc))
        elif body is not None:
            self._run(body)
        if heredoc is not None:  # the parser puts what follows `<<EOF ||` inside the redirect
            self._run_all(part for part in heredoc.named_children if not part.type.startswith("heredoc"))

    def _heredoc(self, node: Node) -> Word:
        start = next((part for part in node.named_children if part.type == "heredoc_start"), None)
        body = next((part for part in node.named_children if part.type == "heredoc_body"), None)
        if body is None:
            return Word("")
        is_quoted = start is not None and text_of(start)[:1] in ("'", '"', "\\")
        return Word(text_of(body)) if is_quoted else self._expander.word(body)

    def command(self, node: Node) -> None:
        """Run one command: a function of the script, a built-in, or a program, which is only recorded."""
        self._command(node, None)

    def _command(self, node: Node, heredoc: Word | None) -> None:
        parts = [part for part in node.named_children if "redirect" not in part.type]
        settings = [part for part in parts if part.type == "variable_assignment"]
        command_words = [word for part in parts if part not in settings for word in self._words(part)]
        if not command_words:
            self._run_all(settings)
            return
        name, arguments = command_words[0].text, command_words[1:]
        if name in self.functions:
            self._call(self.functions[name], arguments)
        elif name in _BUILT_IN:
            _BUILT_IN[name](self, arguments, heredoc)
        elif name in ("exit", "return"):
            raise _ScriptEnd
        else:
            self._record_program(command_words, heredoc)

    def _call(self, body: Node, arguments: list[Word]) -> None:
        before, self.variables.arguments = self.variables.arguments, arguments
        try:
            self._nested(lambda: self._run(body))
        except _ScriptEnd:
            pass
        finally:
            self.variables.arguments = before

    def _record_program(self, command_words: Sequence[Word], heredoc: Word | None) -> None:
        """Record a program, or evaluate it where it is a shell with a script as a word or a here-document."""
        texts = [word.text for word in command_words]
        for position, word in enumerate(texts[:-1]):
            if word in _SHELLS and texts[position + 1] in ("-c", "-lc", "-cl", "-ec"):
                for text in texts[position + 2 : position + 3]:
                    self._fork().run_text(text)
                return
        if heredoc is not None and (texts[-1] in _SHELLS or texts[0] in (*_SHELLS, "sbatch", "ssh", "srun")):
            self._fork().run_text(heredoc.text)
            return
        if texts[0] not in _IGNORED and posixpath.basename(texts[0]) not in _IGNORED:
            self.commands.append(tuple(command_words))

    def choose(self, node: Node) -> None:
        """Run `if` with its other branches."""
        parts = (node, *(clause for clause in node.named_children if clause.type in ("elif_clause", "else_clause")))
        possible: list[list[Node]] = []
        question = ""
        for condition, body in map(_condition_and_body, parts):
            holds = True if condition is None else self._conditions.holds(condition)
            if holds and not possible:
                self._run_branch(body, condition)
                return
            if holds is not False:
                possible.append(body)
                question = question or _quoted(condition or node)
            if holds:
                break
        else:
            possible = [[], *possible]  # without `else`, no branch may run
        if possible != [[]]:
            self._run_undecided(possible, question)

    def _run_branch(self, body: list[Node], condition: Node | None) -> None:
        """Run a decided branch. One that ends the script is reported and skipped, since it would start no training."""
        if condition is not None and _ends(body):
            self.notes.append(
                f"without arguments the script ends at {_quoted(condition)}; the lines after it are read anyway."
            )
            return
        self._run_all(body)

    def _run_undecided(self, branches: list[list[Node]], question: str) -> None:
        """Run the first or the last of several possible branches, leaving out those that end the script.

        Imports evaluate a script twice, with and without `first`, so that the first and the last branch are run.
        """
        continuing = [body for body in branches if not _ends(body)]
        if not continuing:
            return
        self.notes.append(f"whether {question} is not known from the script: each branch was followed.")
        self._run_all(continuing[0 if self.first else -1])

    def case(self, node: Node) -> None:
        """Run the first item of `case` with a pattern that matches the value."""
        value, possible, is_decided = node.child_by_field_name("value"), [], False
        for item in (part for part in node.named_children if part.type == "case_item"):
            patterns = [
                child for index, child in enumerate(item.children) if item.field_name_for_child(index) == "value"
            ]
            body = [part for part in item.named_children if part not in patterns]
            matches = [value is not None and self._conditions.matches(value, pattern) for pattern in patterns]
            if any(matches):
                possible.append(body)
                is_decided = True
                break
            if None in matches:
                possible.append(body)
        if is_decided and len(possible) == 1:
            self._run_branch(possible[0], node)
        elif possible:
            self._run_undecided(possible, f"{_quoted(node)} matches one pattern or another")

    def loop_over(self, node: Node) -> None:
        """Run `for` over words."""
        variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        values = [child for index, child in enumerate(node.children) if node.field_name_for_child(index) == "value"]
        if variable is None or body is None:
            return
        for word in [word for value in values for word in self._words(value)][:_MAX_ITERATIONS]:
            self.variables.values[text_of(variable)] = word
            self._run(body)

    def loop_counted(self, node: Node) -> None:
        """Run `for ((i = 0; i < n; i++))`."""
        initializer, condition = node.child_by_field_name("initializer"), node.child_by_field_name("condition")
        update, body = node.child_by_field_name("update"), node.child_by_field_name("body")
        if initializer is not None:
            self._run(initializer)
        for _ in range(_MAX_ITERATIONS):
            holds = None if condition is None else self._expander.number(condition)
            if holds is None or holds.reasons:
                self._run_undecided([[], [body] if body else []], _quoted(condition or node))
                return
            if holds.text == "0" or body is None:
                return
            self._run(body)
            self._step(update)

    def _step(self, update: Node | None) -> None:
        """Run `i++`; the result of `i += 2` is undecided."""
        if update is None:
            return
        name, before = text_of(update.named_children[0]), Word("0")
        if update.type == "postfix_expression":
            before = self.variables.get(name) or before
            step = -1 if text_of(update).endswith("--") else 1
            self.variables.values[name] = (
                Word(str(int(before.text) + step))
                if before.is_decided
                else undecided(name, f"{name} is counted from an unknown value")
            )
        else:
            self.variables.values[name] = undecided(name, f"{text_of(update)} is not computed")

    def loop_while(self, node: Node) -> None:
        """Run the body of `while` or `until` once at most, since the end of the loop is not known."""
        condition, body = node.child_by_field_name("condition"), node.child_by_field_name("body")
        holds = None if condition is None else self._conditions.holds(condition)
        if text_of(node).startswith("until"):
            holds = None if holds is None else not holds
        if holds is not False and body is not None:
            self._run_undecided([[], [body]], _quoted(condition or node)) if holds is None else self._run(body)

    def and_or(self, node: Node) -> bool | None:
        """Run `a && b` or `a || b`; return the success, or None if it is not known.

        Programs are assumed to succeed, except those that look for NPUs.
        """
        parts = [part for part in node.named_children if part.type != "comment"]
        if len(parts) != _LIST_OPERANDS:
            self._run_all(parts)
            return None
        left, right = parts
        is_and = any(part.type == "&&" for part in node.children)
        holds = self._run_side(left)
        if holds is None and not _ends([right]):
            self._run_undecided([[], [right]], _quoted(left))
        elif holds is is_and and not _ends([right]):
            return self._run_side(right)
        return holds

    def _run_side(self, node: Node) -> bool | None:
        """Run one side of `&&` or `||`. Return its success; a program is assumed to succeed."""
        if node.type == "list":
            return self.and_or(node)
        if node.type in ("test_command", "negated_command") or text_of(node).startswith("(("):
            return self._conditions.holds(node)
        if node.type == "command" and text_of(node) in ("true", ":", "false"):
            return text_of(node) != "false"
        if _OTHER_DEVICE.match(text_of(node)):
            return False
        self._run(node)
        return True

    def arithmetic(self, node: Node) -> None:
        """Run `((i++))`, `((i += 2))`, or a group in braces."""
        if not text_of(node).startswith("(("):
            self.body(node)
            return
        for part in node.named_children:
            if part.type in ("postfix_expression", "unary_expression") and part.named_children:
                self._step(part)

    def _succeeds(self, node: Node) -> bool | None:
        """True or False if a command in a condition is known to succeed or fail; None where it is not known."""
        if _OTHER_DEVICE.match(text_of(node)):
            return False
        if node.type == "command":
            name = text_of(node).split(None, 1)[0] if text_of(node).split() else ""
            if name in ("true", ":", "false"):
                return name != "false"
            if name == "test":
                tests = parse(f"[ {text_of(node)[5:]} ]")
                return self._conditions.holds(tests.named_children[0]) if tests.named_children else None
        self._run(node)
        return True if node.type == "variable_assignment" else None

    def _substitute(self, node: Node) -> Word:
        """The output of a command substitution, where the script alone determines it."""
        reason = f"{_quoted(node)} is the output of a command"
        printed: list[str] = []
        subshell = self._fork(printed)
        subshell.commands, num_notes = [], len(self.notes)
        with contextlib.suppress(_ScriptEnd):
            subshell._run_all(node.named_children)
        is_determined = len(self.notes) == num_notes and not subshell.commands and _is_plain(node)
        if not is_determined or not printed or any(text is _UNKNOWN for text in printed):
            del self.notes[num_notes:]
            return undecided(text_of(node), reason)
        return Word("\n".join(printed).rstrip("\n"))

    def print(self, text: str) -> None:
        if self.printed is not None:
            self.printed.append(text)

    def _read_variable(self, arguments: Sequence[Word], heredoc: Word | None) -> None:
        names = [word.text for word in arguments if not word.text.startswith("-") and word.text]
        if names:
            name = names[-1]
            answer = undecided(f"${name}", f"{name} is read from the input of the script")
            self.variables.values[name] = answer if heredoc is None else replace(heredoc, text=heredoc.text.strip())

    def _source(self, arguments: Sequence[Word], _heredoc: Word | None) -> None:
        if not arguments:
            return
        name = arguments[0].text
        file = (self.path.parent if self.path else Path()) / name
        if self.path is None or not arguments[0].is_decided or not file.is_file():
            self.notes.append(f"{name}, which the script sources, is not beside it: the variables it sets are unknown.")
            return
        text = read_text(file, "script", MAX_YAML_BYTES)
        self.run_text(text)

    def _change_directory(self, arguments: Sequence[Word], _heredoc: Word | None) -> None:
        directories = [word for word in arguments if not word.text.startswith("-")]
        is_known = bool(directories) and directories[0].is_decided
        self.directory = posixpath.normpath(directories[0].text) if is_known else None

    def _echo(self, arguments: Sequence[Word], _heredoc: Word | None) -> None:
        operands = [word for word in arguments if word.text not in ("-n", "-e")]
        is_known = all(word.is_decided for word in operands)
        self.print(" ".join(word.text for word in operands) if is_known else _UNKNOWN)

    def _print_directory(self, _arguments: Sequence[Word], _heredoc: Word | None) -> None:
        self.print(_UNKNOWN if self.directory is None else self.directory)

    def _path_part(self, part: Callable[[str], str], arguments: Sequence[Word], _heredoc: Word | None) -> None:
        operands = [word for word in arguments if not word.text.startswith("-")]
        self.print(part(operands[0].text) if operands and operands[0].is_decided else _UNKNOWN)

    def _evaluate(self, arguments: Sequence[Word], _heredoc: Word | None) -> None:
        self._nested(lambda: self.run_text(" ".join(word.text for word in arguments)))

    def _set_arguments(self, arguments: Sequence[Word], _heredoc: Word | None) -> None:
        plain = [word.text for word in arguments]
        if "--" in plain:
            self.variables.arguments = list(arguments[plain.index("--") + 1 :])

    def _shift_arguments(self, _arguments: Sequence[Word], _heredoc: Word | None) -> None:
        self.variables.arguments = self.variables.arguments[1:]


_UNKNOWN = "\0"
"""Stands in `printed` for output that is not known from the script."""

_STATEMENTS: Mapping[str, Callable[[_Shell, Node], object]] = {
    "variable_assignment": _Shell.assign,
    "variable_assignments": _Shell.body,
    "declaration_command": _Shell.declare,
    "unset_command": _Shell.unset,
    "function_definition": _Shell.define,
    "redirected_statement": _Shell.redirected,
    "command": _Shell.command,
    "if_statement": _Shell.choose,
    "case_statement": _Shell.case,
    "for_statement": _Shell.loop_over,
    "c_style_for_statement": _Shell.loop_counted,
    "while_statement": _Shell.loop_while,
    "list": _Shell.and_or,
    "pipeline": _Shell.body,
    "do_group": _Shell.body,
    "subshell": _Shell.subshell,
    "compound_statement": _Shell.arithmetic,
    "ERROR": _Shell.body,
}

_BUILT_IN: Mapping[str, Callable[[_Shell, Sequence[Word], Word | None], None]] = {
    "read": _Shell._read_variable,
    "source": _Shell._source,
    ".": _Shell._source,
    "cd": _Shell._change_directory,
    "pushd": _Shell._change_directory,
    "pwd": _Shell._print_directory,
    "echo": _Shell._echo,
    "dirname": lambda shell, operands, heredoc: shell._path_part(posixpath.dirname, operands, heredoc),
    "basename": lambda shell, operands, heredoc: shell._path_part(posixpath.basename, operands, heredoc),
    "realpath": lambda shell, operands, heredoc: shell._path_part(posixpath.normpath, operands, heredoc),
    "eval": _Shell._evaluate,
    "set": _Shell._set_arguments,
    "shift": _Shell._shift_arguments,
}


def _parse_errors(root: Node) -> Iterator[Node]:
    """The innermost nodes that the parser could not place, and those that are missing; not those of arithmetic in a
    default, which is parsed alone."""
    waiting = [root] if root.has_error else []
    while waiting:
        node = waiting.pop()
        if node.type == "expansion" and arithmetic_default(text_of(node)):
            continue
        if node.is_missing or (node.is_error and not any(child.is_error for child in node.children)):
            yield node
        else:
            waiting += [
                child for child in reversed(node.children) if child.has_error or child.is_error or child.is_missing
            ]


def _condition_and_body(node: Node) -> tuple[Node | None, list[Node]]:
    """Split a branch of `if` into its condition and its body."""
    rest = [part for part in node.named_children if part.type not in ("elif_clause", "else_clause", "comment")]
    if node.type == "else_clause":
        return None, rest
    return (rest[0], rest[1:]) if rest else (None, [])


def _ends(body: Iterable[Node]) -> bool:
    """True if a branch ends the script."""
    return any(
        (node.type == "command" and text_of(node).split(None, 1)[:1] == ["exit"])
        or (node.type in ("compound_statement", "list", "do_group") and _ends(node.named_children))
        for node in body
    )


def _is_plain(node: Node) -> bool:
    """True if a substitution has no pipe."""
    return not any(part.type == "pipeline" for part in node.named_children)


def _quoted(node: Node) -> str:
    text = " ".join(text_of(node).split())
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]} ..."
