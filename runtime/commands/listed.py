"""The registry of commands: names and help sentences, so that help and completion import no command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from keyword import iskeyword
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


@dataclass(frozen=True)
class CommandEntry:
    """A command: its name, its module under `commands`, and the first sentence of its help."""

    name: str
    module: str
    summary: str

    def load(self) -> TyperCommand:
        """Import the command and return it with its options."""
        module = import_module(f"meshwright.runtime.commands.{self.module}")
        group = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
        function = getattr(module, f"{self.name}_" if iskeyword(self.name) else self.name)
        group.command(self.name, epilog=module.EXAMPLES)(function)
        command = typer.main.get_command(group)
        assert isinstance(command, TyperCommand)
        return command


COMMANDS = (
    CommandEntry(
        "init", "starting.init_command", "Write a first job with a comment on every line; it can be planned as it is."
    ),
    CommandEntry(
        "import",
        "trainers.import_command",
        "Read the configuration of another trainer: write it as a job, cost it as configured, and show faster plans.",
    ),
    CommandEntry(
        "devices",
        "starting.devices_command",
        "List the devices and networks that a job may name, with their data.",
    ),
    CommandEntry(
        "fit",
        "starting.fit_command",
        "Find the smallest number of devices for a job, and the best plan on each of several sizes.",
    ),
    CommandEntry(
        "rollouts",
        "starting.rollouts_command",
        "Print the lengths, turns and latencies of agent rollouts as the workload of a job.",
    ),
    CommandEntry(
        "profile",
        "profile_command",
        "Time the job's stages and collectives on this machine; an interrupted profile is continued.",
    ),
    CommandEntry(
        "plan",
        "plan_command",
        "Search for the fastest plan that fits, and prove how good it is. Ctrl-C keeps the best plan so far.",
    ),
    CommandEntry(
        "verify",
        "verify_command",
        "Check the rules, the costs and optionally a proof of a plan, without the solver.",
    ),
    CommandEntry(
        "explain",
        "explain_command",
        "Explain a plan: its critical path, binding limits and sensitivities, and what each choice gains.",
    ),
    CommandEntry(
        "compare",
        "compare_command",
        "Compare two plans: steps, stages, and how their jobs differ.",
    ),
    CommandEntry(
        "simulate",
        "simulate_command",
        "Run the plan in virtual time: how long steps take, and what each rank waits for.",
    ),
    CommandEntry(
        "rehearse",
        "rehearse_command",
        "Run the plan with real processes and messages that wait instead of computing.",
    ),
    CommandEntry(
        "whatif",
        "whatif_command",
        "Predict a plan with another cluster, workload, precision or other models.",
    ),
    CommandEntry("run", "run_command", "Train by a plan, and compare measured with predicted times."),
    CommandEntry(
        "watch",
        "after_run.watch_command",
        "Follow a run: throughput, predicted and measured times, staleness, idle time, reward, KL.",
    ),
    CommandEntry(
        "calibrate",
        "calibrate_command",
        "Correct a profile by the times of a run; its measurements stay, corrections are added with their origin.",
    ),
    CommandEntry(
        "replan",
        "after_run.replan_command",
        "Re-plan a run from its own lengths and speeds: the best plan from here, and the cost of switching.",
    ),
    CommandEntry(
        "replay",
        "after_run.replay_command",
        "Train again on a batch that a run skipped because of numbers that are not finite, and name the rows.",
    ),
    CommandEntry(
        "export",
        "export_command",
        "Write the trained models of a run, launch scripts of a plan, or its configuration for another trainer.",
    ),
    CommandEntry(
        "report", "report_command", "Draw a plan, its simulation and its runs as one self-contained HTML file."
    ),
    CommandEntry("schema", "starting.schema_command", "Print the JSON Schema of a document."),
)
"""All commands, in the order in which a new user needs them."""

_COMMANDS_BY_NAME = {listed.name: listed for listed in COMMANDS}


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
        """The command as listed, with name and sentence only."""
        del ctx
        listed = _COMMANDS_BY_NAME.get(cmd_name)
        return TyperCommand(listed.name, help=listed.summary) if listed else None

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
