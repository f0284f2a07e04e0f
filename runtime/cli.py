"""The command line: every command parses its options, calls what answers and shows the answer.

A command is loaded when it is called, and torch by what computes on a device: help comes at once, and so does planning.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from typer.exceptions import TyperException

from meshwright.profiles.errors import BadInput, MeshwrightError, RunFailed, is_full
from meshwright.profiles.printable import printable
from meshwright.runtime.commands.listed import Commands
from meshwright.runtime.records.lasting_output import open_standard_streams

_INTERRUPTED = 130
"""What a shell makes of Ctrl-C."""

app = typer.Typer(
    cls=Commands,
    help="Plans, proves and runs RLHF jobs on Megatron-core.",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _tell_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"meshwright {version('meshwright')}")
        raise typer.Exit


@app.callback()
def of_all_commands(
    _version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Options that stand before a command."""


def main() -> None:
    """Runs the command line; an error is one sentence and an exit code."""
    open_standard_streams()
    try:
        code = app(args=sys.argv[1:] or ["--help"], standalone_mode=False)
        sys.stdout.flush()
    except MeshwrightError as error:
        code = _tell(error)
    except TyperException as error:
        code = _tell(BadInput(_of_usage(error)))
    except BrokenPipeError:  # who reads has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        path = f" {error.filename}" if error.filename else ""
        if is_full(error):
            code = _tell(RunFailed(f"cannot write{path}: {error.strerror}; make room there and run this again."))
        else:
            code = _tell(BadInput(f"cannot use{path}: {error.strerror or error}; check the path and its permissions."))
    except MemoryError:
        code = _tell(BadInput("this takes more memory than there is; ask for less."))
    if code == _INTERRUPTED:
        print("stopped by the user; what was written before stays.", file=sys.stderr, flush=True)
        os._exit(code)  # nothing is left to do, and torch takes seconds to be taken down
    sys.exit(code or 0)


def _of_usage(error: TyperException) -> str:
    """What is wrong with an option or an argument, and where they are listed."""
    told = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{told[:1].lower()}{told[1:]}; see `{context.command_path if context else 'meshwright'} --help`."


def _tell(error: MeshwrightError) -> int:
    """Prints the error on one line, whatever it names."""
    told = escape(printable(" ".join(str(error).split("\n"))))
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]error:[/] {told}")
    return error.exit_code
