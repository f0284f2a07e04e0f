"""The commands that a shell script runs, with variables, arrays, arithmetic and branches as a shell has them.

A parser of bash reads the script (tree-sitter-bash), and what the script itself says is evaluated: assignments, arrays,
expansions, arithmetic, conditions, `case`, loops and functions. No program is started. A condition that asks for files
or for the answer of a program is undecided, and so is a word that such an answer is part of: both are told.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from meshwright.planner.imports.shell_conditions import ShellConditions
from meshwright.planner.imports.shell_words import Expander, ShellVariables, Word, text_of, undecided
from meshwright.profiles.errors import BadInput
from meshwright.profiles.values import MOST_YAML_BYTES, read_text

_LANGUAGE = Language(tree_sitter_bash.language())
_SHELLS = ("bash", "sh", "/bin/bash", "/bin/sh", "zsh")
_SILENT = ("echo", "printf", "cat", ":", "true", "false", "set", "shopt", "trap", "sleep", "mkdir", "wait", "local")
"""Commands whose words are no configuration of what they run."""

_OTHER_DEVICE = re.compile(r"^python3? -c .*\bimport torch_npu\b|^npu-smi\b")
"""Commands that ask for devices which are no GPUs: nothing here is planned for them, and they are taken to fail."""

_MOST_STATEMENTS = 20_000
_MOST_TURNS = 64
_SIDES = 2
_DEEPEST = 24
_LONGEST_TOLD = 80


@dataclass(frozen=True, kw_only=True)
class Script:
    """What a script runs: the words of every command, in order, and sentences on what is undecided."""

    commands: tuple[tuple[Word, ...], ...]
    notes: tuple[str, ...] = ()


def read_script(text: str, path: Path | None = None, *, first: bool = False) -> Script:
    """What a script runs, begun without arguments in an empty environment. Files that it sources are read beside
    `path`. Of an undecided condition the last branch is taken, or with `first` the first.

    Raises BadInput where a quote is not closed, and for one that goes on for ever.
    """
    shell = _Shell(path=path, first=first)
    try:
        shell.run_text(text)
    except _Ended:
        pass
    except RecursionError:
        raise BadInput("the script is nested too deep to be read; write the command out.") from None
    return Script(commands=tuple(shell.commands), notes=tuple(dict.fromkeys(shell.notes)))


def words(text: str, *, first: bool = False) -> list[str]:
    """All words of the commands of a script, in their order; see `read_script`."""
    return [word.text for command in read_script(text, first=first).commands for word in command]


class _Ended(Exception):  # noqa: N818 - the normal end of a script
    """The script ends here."""


@dataclass(kw_only=True)
class _Shell:
    """A script that is being followed; what it has set, run and left undecided so far."""

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
        return Expander(self.variables, self._answer)

    @property
    def _conditions(self) -> ShellConditions:
        return ShellConditions(self._expander, self._succeeds)

    def run_text(self, text: str) -> None:
        """Follow a text as a script. Raises BadInput for a quote that is not closed."""
        root = Parser(_LANGUAGE).parse(text.encode()).root_node
        self._require_closed(root)
        self._deeper(lambda: self._run_all(root.children))

    def _require_closed(self, root: Node) -> None:
        for node in _faults(root):
            line = node.start_point[0] + 1
            if text_of(node).lstrip()[:1] in ("'", '"') or node.type in ('"', "'"):
                raise BadInput(f"the script has a line that does not end: line {line}; close its quotes.")
            self.notes.append(f"line {line} of the script is no shell that is understood: {_told(node)}")

    def _deeper(self, act: Callable[[], None]) -> None:
        if self.depth >= _DEEPEST:
            raise BadInput(f"the script calls itself more than {_DEEPEST} deep; write the command out.")
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
        if self.statements > _MOST_STATEMENTS:
            raise BadInput(f"the script runs more than {_MOST_STATEMENTS} statements; write the command out.")
        act = _STATEMENTS.get(node.type)
        if act is not None:
            act(self, node)

    def body(self, node: Node) -> None:
        """All statements of a group."""
        self._run_all(node.named_children)

    def subshell(self, node: Node) -> None:
        """A group of its own, whose settings end with it."""
        inside = self._inside()
        inside.body(node)

    def _inside(self, printed: list[str] | None = None) -> _Shell:
        found = replace(self, variables=self.variables.copy(), functions=dict(self.functions), depth=self.depth + 1)
        found.printed = self.printed if printed is None else printed
        if found.depth > _DEEPEST:
            raise BadInput(f"the script nests more than {_DEEPEST} deep; write the command out.")
        return found

    def assign(self, node: Node) -> None:
        """Follows `A=x`, `A+=x`, `A=(x y)`, `A+=(x y)`, `A[1]=x`."""
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if target is None:
            return
        adds = any(part.type == "+=" for part in node.children)
        if target.type == "subscript":
            self._assign_element(target, value)
            return
        name = text_of(target)
        if value is not None and value.type == "array":
            elements = [word for one in value.named_children for word in self._fields(one)]
            before = self.variables.all_of(name) or [] if adds else []
            self.variables.arrays[name] = [*before, *elements]
            self.variables.values.pop(name, None)
            return
        word = Word("") if value is None else self._expander.word(value)
        before_word = self.variables.of(name)
        self.variables.values[name] = before_word + word if adds and before_word is not None else word
        self.variables.arrays.pop(name, None)

    def _assign_element(self, target: Node, value: Node | None) -> None:
        named, index = target.child_by_field_name("name"), target.child_by_field_name("index")
        if named is None or index is None or value is None:
            return
        elements = self.variables.arrays.setdefault(text_of(named), [])
        place = self._expander.number(index)
        if place.is_decided and 0 <= int(place.text) <= len(elements):
            elements[int(place.text) : int(place.text) + 1] = [self._expander.word(value)]

    def _fields(self, node: Node) -> list[Word]:
        return [] if node.type == "comment" else self._expander.fields(node)

    def declare(self, node: Node) -> None:
        """Follows `export A=x`, `local A=x` and the like."""
        self._run_all(part for part in node.named_children if part.type == "variable_assignment")

    def unset(self, node: Node) -> None:
        for part in node.named_children:
            self.variables.values.pop(text_of(part), None)
            self.variables.arrays.pop(text_of(part), None)

    def define(self, node: Node) -> None:
        """A function, by its name."""
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self.functions[text_of(name)] = body

    def redirected(self, node: Node) -> None:
        """A command with a here-document or another file in place of its input or output."""
        body = node.child_by_field_name("body")
        heredoc = next((part for part in node.named_children if part.type == "heredoc_redirect"), None)
        if body is not None and body.type == "command" and heredoc is not None:
            self._command(body, self._heredoc(heredoc))
        elif body is not None:
            self._run(body)
        if heredoc is not None:  # what follows behind `<<EOF ||` stands inside of it
            self._run_all(part for part in heredoc.named_children if not part.type.startswith("heredoc"))

    def _heredoc(self, node: Node) -> Word:
        start = next((part for part in node.named_children if part.type == "heredoc_start"), None)
        body = next((part for part in node.named_children if part.type == "heredoc_body"), None)
        if body is None:
            return Word("")
        is_quoted = start is not None and text_of(start)[:1] in ("'", '"', "\\")
        return Word(text_of(body)) if is_quoted else self._expander.word(body)

    def command(self, node: Node) -> None:
        """One command, which is a function of the script, built in, or a program that is not started."""
        self._command(node, None)

    def _command(self, node: Node, heredoc: Word | None) -> None:
        parts = [part for part in node.named_children if "redirect" not in part.type]
        settings = [part for part in parts if part.type == "variable_assignment"]
        given = [word for part in parts if part not in settings for word in self._fields(part)]
        if not given:
            self._run_all(settings)
            return
        name, arguments = given[0].text, given[1:]
        if name in self.functions:
            self._call(self.functions[name], arguments)
        elif name in _BUILT_IN:
            _BUILT_IN[name](self, arguments, heredoc)
        elif name in ("exit", "return"):
            raise _Ended
        else:
            self._started(given, heredoc)

    def _call(self, body: Node, arguments: list[Word]) -> None:
        before, self.variables.arguments = self.variables.arguments, arguments
        try:
            self._deeper(lambda: self._run(body))
        except _Ended:
            pass
        finally:
            self.variables.arguments = before

    def _started(self, given: Sequence[Word], heredoc: Word | None) -> None:
        """A program, which may be a shell itself that is given its script as a word or as a here-document."""
        plain = [word.text for word in given]
        for place, word in enumerate(plain[:-1]):
            if word in _SHELLS and plain[place + 1] in ("-c", "-lc", "-cl", "-ec"):
                for text in plain[place + 2 : place + 3]:
                    self._inside().run_text(text)
                return
        if heredoc is not None and (plain[-1] in _SHELLS or plain[0] in (*_SHELLS, "sbatch", "ssh", "srun")):
            self._inside().run_text(heredoc.text)
            return
        if plain[0] not in _SILENT and posixpath.basename(plain[0]) not in _SILENT:
            self.commands.append(tuple(given))

    def choose(self, node: Node) -> None:
        """Follows `if` with its other branches."""
        parts = (node, *(one for one in node.named_children if one.type in ("elif_clause", "else_clause")))
        possible: list[list[Node]] = []
        whether = ""
        for condition, body in map(_condition_and_body, parts):
            holds = True if condition is None else self._conditions.holds(condition)
            if holds and not possible:
                self._take(body, condition)
                return
            if holds is not False:
                possible.append(body)
                whether = whether or _told(condition or node)
            if holds:
                break
        else:
            possible = [[], *possible]
        if possible != [[]]:
            self._one_of(possible, whether)

    def _take(self, body: list[Node], condition: Node | None) -> None:
        """A branch that is decided; one that ends the script is told and left out, since no run would begin."""
        if condition is not None and _ends(body):
            self.notes.append(f"without arguments the script ends at {_told(condition)}; it is read on behind that.")
            return
        self._run_all(body)

    def _one_of(self, branches: list[list[Node]], told: str) -> None:
        """One of several branches that might be taken, none that ends the script."""
        going_on = [body for body in branches if not _ends(body)]
        if not going_on:
            return
        self.notes.append(f"whether {told} is not known from the script: each way was followed.")
        self._run_all(going_on[0 if self.first else -1])

    def case(self, node: Node) -> None:
        """Follows the first item of `case` that has a pattern for the value."""
        value, possible, is_decided = node.child_by_field_name("value"), [], False
        for item in (part for part in node.named_children if part.type == "case_item"):
            patterns = [
                child for place, child in enumerate(item.children) if item.field_name_for_child(place) == "value"
            ]
            body = [part for part in item.named_children if part not in patterns]
            found = [value is not None and self._conditions.matches(value, pattern) for pattern in patterns]
            if any(found):
                possible.append(body)
                is_decided = True
                break
            if None in found:
                possible.append(body)
        if is_decided and len(possible) == 1:
            self._take(possible[0], node)
        elif possible:
            self._one_of(possible, f"{_told(node)} is of one pattern or another")

    def loop_over(self, node: Node) -> None:
        """Follows `for` over words."""
        variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        values = [child for place, child in enumerate(node.children) if node.field_name_for_child(place) == "value"]
        if variable is None or body is None:
            return
        for word in [word for value in values for word in self._fields(value)][:_MOST_TURNS]:
            self.variables.values[text_of(variable)] = word
            self._run(body)

    def loop_counted(self, node: Node) -> None:
        """Follows `for ((i = 0; i < n; i++))`."""
        begin, condition = node.child_by_field_name("initializer"), node.child_by_field_name("condition")
        update, body = node.child_by_field_name("update"), node.child_by_field_name("body")
        if begin is not None:
            self._run(begin)
        for _ in range(_MOST_TURNS):
            holds = None if condition is None else self._expander.number(condition)
            if holds is None or holds.reasons:
                self._one_of([[], [body] if body else []], _told(condition or node))
                return
            if holds.text == "0" or body is None:
                return
            self._run(body)
            self._step(update)

    def _step(self, update: Node | None) -> None:
        """Follows `i++` and `i += 2`."""
        if update is None:
            return
        name, before = text_of(update.named_children[0]), Word("0")
        if update.type == "postfix_expression":
            before = self.variables.of(name) or before
            step = -1 if text_of(update).endswith("--") else 1
            self.variables.values[name] = (
                Word(str(int(before.text) + step)) if before.is_decided else undecided(name, f"{name} is counted")
            )
        else:
            self.variables.values[name] = undecided(name, f"{text_of(update)} is not computed")

    def loop_while(self, node: Node) -> None:
        """Follows a loop once at most: what it waits for, or counts, is not known."""
        condition, body = node.child_by_field_name("condition"), node.child_by_field_name("body")
        holds = None if condition is None else self._conditions.holds(condition)
        if text_of(node).startswith("until"):
            holds = None if holds is None else not holds
        if holds is not False and body is not None:
            self._one_of([[], [body]], _told(condition or node)) if holds is None else self._run(body)

    def both(self, node: Node) -> bool | None:
        """`a && b` and `a || b`: programs are taken to succeed, but those that ask for devices which are no GPUs."""
        parts = [part for part in node.named_children if part.type != "comment"]
        if len(parts) != _SIDES:
            self._run_all(parts)
            return None
        left, right = parts
        is_and = any(part.type == "&&" for part in node.children)
        holds = self._outcome(left)
        if holds is None and not _ends([right]):
            self._one_of([[], [right]], _told(left))
        elif holds is is_and and not _ends([right]):
            return self._outcome(right)
        return holds

    def _outcome(self, node: Node) -> bool | None:
        """Run one side of `&&` or `||`, and say whether it succeeds; a program is taken to."""
        if node.type == "list":
            return self.both(node)
        if node.type in ("test_command", "negated_command") or text_of(node).startswith("(("):
            return self._conditions.holds(node)
        if node.type == "command" and text_of(node) in ("true", ":", "false"):
            return text_of(node) != "false"
        if _OTHER_DEVICE.match(text_of(node)):
            return False
        self._run(node)
        return True

    def arithmetic(self, node: Node) -> None:
        """`((i++))` and `((i += 2))`, or a group in braces."""
        if not text_of(node).startswith("(("):
            self.body(node)
            return
        for part in node.named_children:
            if part.type in ("postfix_expression", "unary_expression") and part.named_children:
                self._step(part)

    def _succeeds(self, node: Node) -> bool | None:
        """Whether a command in a condition does."""
        if _OTHER_DEVICE.match(text_of(node)):
            return False
        if node.type == "command":
            name = text_of(node).split(None, 1)[0] if text_of(node).split() else ""
            if name in ("true", ":", "false"):
                return name != "false"
            if name == "test":
                again = Parser(_LANGUAGE).parse(f"[ {text_of(node)[5:]} ]".encode()).root_node
                return self._conditions.holds(again.named_children[0]) if again.named_children else None
        self._run(node)
        return True if node.type == "variable_assignment" else None

    def _answer(self, node: Node) -> Word:
        """The output of a command substitution, where the script itself determines it."""
        reason = f"{_told(node)} is what a command answers"
        printed: list[str] = []
        inside = self._inside(printed)
        inside.commands, before = [], len(self.notes)
        with contextlib.suppress(_Ended):
            inside._run_all(node.named_children)
        simple = len(self.notes) == before and not inside.commands and _is_plain(node)
        if not simple or not printed or any(one is _UNKNOWN for one in printed):
            del self.notes[before:]
            return undecided(text_of(node), reason)
        return Word("\n".join(printed).rstrip("\n"))

    def print(self, text: str) -> None:
        if self.printed is not None:
            self.printed.append(text)

    def _read(self, arguments: Sequence[Word], heredoc: Word | None) -> None:
        names = [word.text for word in arguments if not word.text.startswith("-") and word.text]
        if names:
            name = names[-1]
            answer = undecided(f"${name}", f"{name} is read from outside of the script")
            self.variables.values[name] = answer if heredoc is None else replace(heredoc, text=heredoc.text.strip())

    def _source(self, arguments: Sequence[Word], _heredoc: Word | None) -> None:
        if not arguments:
            return
        name = arguments[0].text
        file = (self.path.parent if self.path else Path()) / name
        if self.path is None or not arguments[0].is_decided or not file.is_file():
            self.notes.append(f"{name} is not here, which the script reads: what it sets is not known.")
            return
        text = read_text(file, "script", MOST_YAML_BYTES)
        self.run_text(text)

    def _change_directory(self, arguments: Sequence[Word], _heredoc: Word | None) -> None:
        places = [word for word in arguments if not word.text.startswith("-")]
        known = bool(places) and places[0].is_decided
        self.directory = posixpath.normpath(places[0].text) if known else None

    def _say(self, arguments: Sequence[Word], _heredoc: Word | None) -> None:
        given = [word for word in arguments if word.text not in ("-n", "-e")]
        known = all(word.is_decided for word in given)
        self.print(" ".join(word.text for word in given) if known else _UNKNOWN)

    def _where(self, _arguments: Sequence[Word], _heredoc: Word | None) -> None:
        self.print(_UNKNOWN if self.directory is None else self.directory)

    def _path_part(self, part: Callable[[str], str], arguments: Sequence[Word], _heredoc: Word | None) -> None:
        given = [word for word in arguments if not word.text.startswith("-")]
        self.print(part(given[0].text) if given and given[0].is_decided else _UNKNOWN)

    def _evaluate(self, arguments: Sequence[Word], _heredoc: Word | None) -> None:
        self._deeper(lambda: self.run_text(" ".join(word.text for word in arguments)))

    def _set(self, arguments: Sequence[Word], _heredoc: Word | None) -> None:
        plain = [word.text for word in arguments]
        if "--" in plain:
            self.variables.arguments = list(arguments[plain.index("--") + 1 :])

    def _shift(self, _arguments: Sequence[Word], _heredoc: Word | None) -> None:
        self.variables.arguments = self.variables.arguments[1:]


_UNKNOWN = "\0"

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
    "list": _Shell.both,
    "pipeline": _Shell.body,
    "do_group": _Shell.body,
    "subshell": _Shell.subshell,
    "compound_statement": _Shell.arithmetic,
    "ERROR": _Shell.body,
}

_BUILT_IN: Mapping[str, Callable[[_Shell, Sequence[Word], Word | None], None]] = {
    "read": _Shell._read,
    "source": _Shell._source,
    ".": _Shell._source,
    "cd": _Shell._change_directory,
    "pushd": _Shell._change_directory,
    "pwd": _Shell._where,
    "echo": _Shell._say,
    "dirname": lambda shell, given, heredoc: shell._path_part(posixpath.dirname, given, heredoc),
    "basename": lambda shell, given, heredoc: shell._path_part(posixpath.basename, given, heredoc),
    "realpath": lambda shell, given, heredoc: shell._path_part(posixpath.normpath, given, heredoc),
    "eval": _Shell._evaluate,
    "set": _Shell._set,
    "shift": _Shell._shift,
}


def _faults(root: Node) -> Iterator[Node]:
    """Nodes that the parser could not place, or found missing; the outermost alone."""
    waiting = [root] if root.has_error else []
    while waiting:
        node = waiting.pop()
        if node.is_missing or (node.is_error and not any(child.is_error for child in node.children)):
            yield node
        else:
            waiting += [
                child for child in reversed(node.children) if child.has_error or child.is_error or child.is_missing
            ]


def _condition_and_body(node: Node) -> tuple[Node | None, list[Node]]:
    """Splits a branch of `if` into its condition and its body."""
    rest = [part for part in node.named_children if part.type not in ("elif_clause", "else_clause", "comment")]
    if node.type == "else_clause":
        return None, rest
    return (rest[0], rest[1:]) if rest else (None, [])


def _ends(body: Iterable[Node]) -> bool:
    """Whether a branch ends the script."""
    return any(
        (node.type == "command" and text_of(node).split(None, 1)[:1] == ["exit"])
        or (node.type in ("compound_statement", "list", "do_group") and _ends(node.named_children))
        for node in body
    )


def _is_plain(node: Node) -> bool:
    """Whether a substitution has no pipe."""
    return not any(part.type == "pipeline" for part in node.named_children)


def _told(node: Node) -> str:
    text = " ".join(text_of(node).split())
    return text if len(text) <= _LONGEST_TOLD else f"{text[:_LONGEST_TOLD]} ..."
