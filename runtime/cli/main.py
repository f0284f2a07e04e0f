"""The command line: the registry of commands, the entry point, and the handling of errors.

The registry has names and help sentences, so that help and completion import no command. A command is imported when it
is called, and torch only by commands that use a device, so help and planning start fast. For exit codes see
`profiles.errors`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from keyword import iskeyword
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from meshwright.profiles.errors import BadInput, MeshwrightError, RunFailed, is_disk_failure
from meshwright.profiles.untrusted_text import printable, without_long_words
from meshwright.runtime.cli.usage_errors import usage_sentence
from meshwright.runtime.device.garbage_collection import no_garbage_collection
from meshwright.runtime.records.lasting_output import open_standard_streams


@dataclass(frozen=True)
class CommandEntry:
    """A command, which has a module of its own in this folder, and the first sentence of its help."""

    name: str
    summary: str

    def load(self) -> TyperCommand:
        """Import the command and return it with its options."""
        name = f"{self.name}_" if iskeyword(self.name) else self.name
        with no_garbage_collection():  # the many objects that modules define are never garbage
            module = import_module(f"meshwright.runtime.cli.{name}")
        group = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
        group.command(self.name, epilog=module.EXAMPLES)(getattr(module, name))
        command = typer.main.get_command(group)
        assert isinstance(command, TyperCommand)
        return command


COMMANDS = (
    CommandEntry("init", "Write a first job with a comment on every line; it can be planned as it is."),
    CommandEntry(
        "import",
        "Read the configuration of another trainer: write it as a job, cost it as configured, and show faster plans.",
    ),
    CommandEntry(
        "devices",
        "List the devices and networks that a job may name, with their data.",
    ),
    CommandEntry(
        "fit",
        "Find the smallest number of devices for a job, and the best plan on each of several sizes.",
    ),
    CommandEntry(
        "rollouts",
        "Print the lengths, turns and latencies of agent rollouts as the workload of a job.",
    ),
    CommandEntry(
        "reward",
        "Try the rewards of a job: score the reference answers of a few prompts, and the prompts themselves.",
    ),
    CommandEntry(
        "profile",
        "Time the job's stages and collectives on this machine; an interrupted profile is continued.",
    ),
    CommandEntry(
        "plan",
        "Search for the fastest plan that fits, and prove how good it is. Ctrl-C keeps the best plan so far.",
    ),
    CommandEntry(
        "verify",
        "Check the rules, the costs and optionally a proof of a plan, without the solver.",
    ),
    CommandEntry(
        "explain",
        "Explain a plan: its critical path, binding limits and sensitivities, and what each choice gains.",
    ),
    CommandEntry(
        "compare",
        "Compare two plans: steps, stages, and how their jobs differ.",
    ),
    CommandEntry(
        "simulate",
        "Run the plan in virtual time: how long steps take, and what each rank waits for.",
    ),
    CommandEntry(
        "rehearse",
        "Run the plan with real processes and messages that wait instead of computing.",
    ),
    CommandEntry(
        "whatif",
        "Predict a plan with another cluster, workload, precision or other models.",
    ),
    CommandEntry("explore", "Serve a local page on which a job is changed and its plan answers. Ctrl-C ends it."),
    CommandEntry("run", "Train by a plan, and compare measured with predicted times."),
    CommandEntry(
        "watch",
        "Follow a run: throughput, predicted and measured times, staleness, idle time, reward, KL.",
    ),
    CommandEntry(
        "calibrate",
        "Correct a profile by the times of a run; its measurements stay, corrections are added with their origin.",
    ),
    CommandEntry(
        "replan",
        "Re-plan a run from its own lengths and speeds: the best plan from here, and the cost of switching.",
    ),
    CommandEntry(
        "replay",
        "Train again on a batch that a run skipped because of numbers that are not finite, and name the rows.",
    ),
    CommandEntry(
        "export",
        "Write the trained models of a run, launch scripts of a plan, or its configuration for another trainer.",
    ),
    CommandEntry("report", "Draw a plan, its simulation and its runs as one self-contained HTML file."),
    CommandEntry("schema", "Print the JSON Schema of a document."),
)
"""All commands, in the order in which a new user needs them."""

_COMMANDS_BY_NAME = {entry.name: entry for entry in COMMANDS}


class Commands(TyperGroup):
    """The group of all commands; only the called one is imported."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**{**attributes, "commands": {}})
        self.commands = _LazyCommands()  # type: ignore[assignment]  # nothing is added to them

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the order in which a new user needs them."""
        del ctx
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:
        """The command with its name and summary only, without importing it."""
        del ctx
        entry = _COMMANDS_BY_NAME.get(cmd_name)
        return TyperCommand(entry.name, help=entry.summary) if entry else None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Import the called command and return it with its arguments."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, self.commands[name] if name and command else None, rest


class _LazyCommands(Mapping[str, TyperCommand]):
    """The commands by name, each imported on access."""

    def __getitem__(self, name: str) -> TyperCommand:
        return _COMMANDS_BY_NAME[name].load()

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS_BY_NAME)

    def __len__(self) -> int:
        return len(_COMMANDS_BY_NAME)


_INTERRUPTED = 130
"""Exit code of a shell after Ctrl-C."""

app = typer.Typer(
    cls=Commands,
    help="Plans, proves and runs RLHF jobs on Megatron-core.",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        print(f"meshwright {version('meshwright')}")
        raise typer.Exit


@app.callback()
def global_options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before a command."""


def main() -> None:
    """Run the command line; an error is printed as one sentence and sets the exit code."""
    open_standard_streams()
    try:
        _require_no_empty_argument(sys.argv[1:])
        code = app(args=sys.argv[1:] or ["--help"], standalone_mode=False)
        sys.stdout.flush()
    except MeshwrightError as error:
        code = _print_error(error)
    except TyperException as error:
        code = _print_error(BadInput(usage_sentence(error, tuple(_COMMANDS_BY_NAME), sys.argv[1:])))
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        path = f" {error.filename}" if error.filename else ""
        if is_disk_failure(error):
            code = _print_error(RunFailed(f"cannot write{path}: {error.strerror}; make room there and run this again."))
        else:
            code = _print_error(
                BadInput(f"cannot use{path}: {error.strerror or error}; check the path and its permissions.")
            )
    except MemoryError:
        code = _print_error(BadInput("too little memory is free for this; reduce the job, or use a machine with more."))
    if code == _INTERRUPTED:
        print("stopped by the user; files that were written before stay.", file=sys.stderr, flush=True)
        os._exit(code)  # at once, because torch takes seconds to shut down
    sys.exit(code or 0)


def _require_no_empty_argument(arguments: Sequence[str]) -> None:
    """Raise BadInput for an argument without a visible character: as a path it would be the current directory."""
    for before, argument in pairwise(["", *arguments]):
        if not argument.strip():
            name = f"the value of {before}" if before.startswith("-") else "an argument"
            raise BadInput(f"{name} is empty; give one (a variable of the shell may be unset).")


def _print_error(error: MeshwrightError) -> int:
    """Print the error on one line and return its exit code."""
    message = escape(printable(without_long_words(" ".join(str(error).split("\n")))))
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]error:[/] {message}")
    return error.exit_code
