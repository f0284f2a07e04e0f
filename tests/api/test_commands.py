"""Every command has its functions in `meshwright.api`: each option is an argument with the same default, and each
argument an option.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperCommand

from meshwright import api
from meshwright.runtime.cli.main import COMMANDS

FUNCTIONS: Mapping[str, str] = {
    "init": "first_job",
    "import": "import_configuration write_plan",
    "devices": "known_hardware",
    "fit": "fit fit_plot observed_lengths with_observed_lengths",
    "rollouts": "agent_workload",
    "reward": "try_rewards",
    "profile": "profile import_operators",
    "plan": "plan plan_for structures structures_for summary prove write_proof read_pins observed_lengths write_plan",
    "verify": "verify read_proof",
    "explain": "explain",
    "compare": "compare",
    "simulate": "simulate timeline read_run",
    "rehearse": "rehearse timeline",
    "whatif": "whatif sweep plot",
    "explore": "sweep plan compare summary with_setting write_plan",
    "run": "run",
    "watch": "watch",
    "calibrate": "calibrate write_table",
    "replan": "replan write_plan",
    "replay": "replay",
    "export": "export_models export_scripts export_plan",
    "report": "report simulate timeline whatif read_run read_training_curves",
    "schema": "schema",
}
"""The functions that answer a command."""

ARGUMENTS: Mapping[str, str] = {
    "profile": "table",
    "gap": "limits",
    "time_limit": "limits",
    "per_steps": "num_steps",
    "model": "models model shapes",
    "allow_module": "allow_modules",
    "durations": "sampled",
    "setting": "settings setting",
    "trainer": "trainer",
    "pin": "pins",
    "from_trace": "trace",
    "trace_field": "keys",
    "run": "run directory",
    "job": "job facts",
    "output": "output path directory",
    "to": "to",
    "ranks": "num_ranks",
    "init batch": "batch_size",
    "init gpus": "num_ranks",
    "import configuration": "path",
    "reward rows": "num_prompts",
    "plan start": "start",
    "plan top": "count",
    "plan pins": "path",
    "plan proof": "proof",
    "compare plan": "one",
    "simulate trace": "sources",
    "simulate beside": "directory",
    "rehearse trace": "sources",
    "report trace": "sources",
    "explore source": "facts job",
    "explore grid": "settings",
    "whatif ranges": "settings",
    "whatif output": "finished",
    "explore beside": "one",
    "export source": "run plan",
    "calibrate output": "table path",
    "run rendezvous": "rendezvous",
    "run nodes": "rendezvous",
    "run node_rank": "rendezvous",
    "run token_file": "rendezvous",
}
"""Arguments of other names than their options, for all commands or for one."""

OPTIONS_ALONE: Mapping[str, str] = {
    "as_json": "a function returns the document itself",
    "init price": "the printed command that plans the job has it",
    "reward action": "there is one",
    "profile source": "`profile` times this machine, `import_operators` reads what NVIDIA measured",
    "fit plot": "`fit_plot` returns the page",
    "whatif plot": "`plot` returns the page",
    "import plan": "the plan is a field of the answer, for `write_plan`",
    "explore port": "a page is served by the command alone",
    "watch once": "a call returns the status once",
    "watch every": "a call returns the status once",
    "report output": "`report` returns the page",
}
"""Options that no function needs, and why."""

ARGUMENTS_ALONE = {
    "progress",
    "directory",
    "search_seconds",
    "traced",
    "engines",
    "observed",
    "simulation",
    "training_curves",
    "finished",
    "on_points",
}
"""Arguments in the place of what a command reads from files, shows by itself or makes by another function."""


def arguments_of(command: str) -> dict[str, inspect.Parameter]:
    """The arguments of a command's functions by name; the first function that has one decides."""
    found: dict[str, inspect.Parameter] = {}
    for name in FUNCTIONS[command].split():
        for argument, parameter in inspect.signature(getattr(api, name)).parameters.items():
            found.setdefault(argument, parameter)
    return found


def counterparts(command: str, option: str) -> list[str]:
    """The names that an option's argument may have."""
    return [option, *ARGUMENTS.get(option, "").split(), *ARGUMENTS.get(f"{command} {option}", "").split()]


def missing(command: str, loaded: TyperCommand) -> Iterator[str]:
    arguments = arguments_of(command)
    named: set[str] = set()
    for option in (parameter.name for parameter in loaded.params if parameter.name):
        found = set(counterparts(command, option)) & arguments.keys()
        named |= found
        if not found and not {option, f"{command} {option}"} & OPTIONS_ALONE.keys():
            yield f"`{command}` has {option}, and no argument of {FUNCTIONS[command]} is it"
    first = FUNCTIONS[command].split()[0]
    for argument in inspect.signature(getattr(api, first)).parameters.keys() - named - ARGUMENTS_ALONE:
        yield f"`api.{first}` has {argument}, and no option of `{command}` is it"


def plain(value: Any) -> Any:
    """A default as plain data: an option that may be repeated, and one that is not given, have none."""
    value = value.value if isinstance(value, Enum) else value
    return None if value in ((), [], {}) or isinstance(value, Path) else value


def other_defaults(command: str, loaded: TyperCommand) -> Iterator[str]:
    arguments = arguments_of(command)
    for option in loaded.params:
        names = [name for name in counterparts(command, option.name or "") if name in arguments]
        renamed = {option.name, f"{command} {option.name}"} & ARGUMENTS.keys()
        if option.required or not names or renamed:
            continue
        of_option, of_argument = plain(option.default), plain(arguments[names[0]].default)
        if of_argument is not inspect.Parameter.empty and of_option != of_argument:
            yield f"`{command}` has {option.name} {of_option!r} by default, and `api` {of_argument!r}"


def test_every_command_has_its_functions() -> None:
    assert [entry.name for entry in COMMANDS] == list(FUNCTIONS)


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry.name)
def test_options_and_arguments_are_the_same(entry: Any) -> None:
    loaded = entry.load()
    assert list(missing(entry.name, loaded)) == []
    assert list(other_defaults(entry.name, loaded)) == []
