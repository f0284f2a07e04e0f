"""The command line: every command parses its options, calls what answers and shows the answer.

What computes on a device imports torch when it is called, so that planning starts at once.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from typer.exceptions import TyperException

from meshwright.planner.plan.job import Job
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.documents import Document
from meshwright.profiles.errors import BadInput, MeshwrightError
from meshwright.profiles.table import Table
from meshwright.runtime.commands import (
    calibrate_command,
    explain_command,
    export_command,
    plan_command,
    profile_command,
    rehearse_command,
    replan_command,
    replay_command,
    report_command,
    run_command,
    simulate_command,
    verify_command,
    whatif_command,
)
from meshwright.runtime.commands.options import SchemaOf

_INTERRUPTED = 130
"""What a shell makes of Ctrl-C."""

app = typer.Typer(
    help="Plans, proves and runs PPO-RLHF jobs on Megatron-core.",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _tell_version(asked: bool) -> None:
    if asked:
        print(f"meshwright {version('meshwright')}")
        raise typer.Exit


@app.callback()
def of_all_commands(
    _version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Options that stand before a command."""


@app.command(epilog="Example: meshwright schema job > job.schema.json")
def schema(document: Annotated[SchemaOf, typer.Argument(help="Which document.")]) -> None:
    """Print the JSON Schema of a document."""
    kinds: dict[SchemaOf, type[Document]] = {SchemaOf.JOB: Job, SchemaOf.PLAN: Plan, SchemaOf.TABLE: Table}
    print(json.dumps(kinds[document].model_json_schema(), indent=2, sort_keys=True))


app.command(epilog=profile_command.EXAMPLE)(profile_command.profile)
app.command(epilog=plan_command.EXAMPLES)(plan_command.plan)
app.command(epilog=verify_command.EXAMPLES)(verify_command.verify)
app.command(epilog=explain_command.EXAMPLES)(explain_command.explain)
app.command(epilog=simulate_command.EXAMPLE)(simulate_command.simulate)
app.command(epilog=rehearse_command.EXAMPLE)(rehearse_command.rehearse)
app.command(epilog=whatif_command.EXAMPLE)(whatif_command.whatif)
app.command(epilog=run_command.EXAMPLE)(run_command.run)
app.command(epilog=calibrate_command.EXAMPLE)(calibrate_command.calibrate)
app.command(epilog=replan_command.EXAMPLES)(replan_command.replan)
app.command(epilog=replay_command.EXAMPLE)(replay_command.replay)
app.command(epilog=report_command.EXAMPLE)(report_command.report)
app.command(epilog=export_command.EXAMPLES)(export_command.export)


def main() -> None:
    """Runs the command line; an error is one sentence and an exit code."""
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
        code = _tell(BadInput(f"cannot use{path}: {error.strerror or error}; check the path and its permissions."))
    except MemoryError:
        code = _tell(BadInput("this takes more memory than there is; ask for less."))
    if code == _INTERRUPTED:
        print("stopped by the user; what was written before stays.", file=sys.stderr)
    sys.exit(code or 0)


def _of_usage(error: TyperException) -> str:
    """What is wrong with an option or an argument, and where they are listed."""
    told = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{told[:1].lower()}{told[1:]}; see `{context.command_path if context else 'meshwright'} --help`."


def _tell(error: MeshwrightError) -> int:
    """Prints the error on one line, whatever it names."""
    told = " ".join(escape(str(error)).split("\n"))
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]error:[/] {told}")
    return error.exit_code
