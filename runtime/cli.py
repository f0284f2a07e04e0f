"""The command line.

A command is imported when it is called, and torch only by commands that use a device, so help and planning start fast.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from typer.exceptions import TyperException

from meshwright.profiles.errors import BadInput, MeshwrightError, RunFailed, is_disk_failure
from meshwright.profiles.printable import printable
from meshwright.runtime.commands.listed import Commands
from meshwright.runtime.records.lasting_output import open_standard_streams

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
    """Run the command line; an error is one sentence and an exit code."""
    open_standard_streams()
    try:
        code = app(args=sys.argv[1:] or ["--help"], standalone_mode=False)
        sys.stdout.flush()
    except MeshwrightError as error:
        code = _print_error(error)
    except TyperException as error:
        code = _print_error(BadInput(_usage_sentence(error)))
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
        code = _print_error(BadInput("this takes more memory than there is; ask for less."))
    if code == _INTERRUPTED:
        print("stopped by the user; files that were written before stay.", file=sys.stderr, flush=True)
        os._exit(code)  # at once, because torch takes seconds to shut down
    sys.exit(code or 0)


def _usage_sentence(error: TyperException) -> str:
    """Return a usage error as one sentence that names the help."""
    message = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{message[:1].lower()}{message[1:]}; see `{context.command_path if context else 'meshwright'} --help`."


def _print_error(error: MeshwrightError) -> int:
    """Print the error on one line and return its exit code."""
    message = escape(printable(" ".join(str(error).split("\n"))))
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]error:[/] {message}")
    return error.exit_code
