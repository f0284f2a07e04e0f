"""The command that imports the configuration of another trainer."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from meshwright.planner.job.model_paths import parse_model_path
from meshwright.planner.plan.plan import write_plan
from meshwright.planner.solver.result import Limits
from meshwright.planner.trainers.importer import Imported
from meshwright.profiles.documents import write_atomically
from meshwright.profiles.errors import BadInput
from meshwright.runtime.api.trainers import import_configuration
from meshwright.runtime.cli import view_trainers
from meshwright.runtime.cli.call import limit_memory, progress_bars, read_profile
from meshwright.runtime.cli.options import AsJson, Gap, Profile, TrainerName, finite
from meshwright.runtime.records.outputs import Output, OutputKind, require_outputs

EXAMPLES = """Example: meshwright import run_ppo.sh --from verl --device h100-sxm --model models/Qwen2.5-7B -o job.yaml

meshwright import config.yaml --from nemo-rl --device h100-sxm --model actor=A --model reward=R --plan plan.json
"""

SearchSeconds = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        min=0.1,
        max=1e6,
        callback=finite,
        help="Time limit of each of its three searches, which then return the best plan so far.",
    ),
]


def import_(
    configuration: Annotated[Path, typer.Argument(metavar="CONFIG", help="The script or YAML file.")],
    *,
    trainer: Annotated[TrainerName, typer.Option("--from", help="The trainer that it configures.")],
    device: Annotated[str, typer.Option(help="A device of `meshwright devices`.")],
    network: Annotated[
        str | None,
        typer.Option(help="The network between nodes, of `meshwright devices`; by default the device's usual one."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Local directory of a model: PATH, or role=PATH; may be given several times."),
    ] = None,
    changed: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a key of the configuration; may be given several times.",
        ),
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Write the job here; a new file.")] = Path("job.yaml"),
    plan: Annotated[Path | None, typer.Option("--plan", help="Write the plan of the configuration here.")] = None,
    profile: Profile = None,
    gap: Gap = None,
    time_limit: SearchSeconds = None,
    as_json: AsJson = False,
) -> None:
    """Read the configuration of another trainer: write it as a job, cost it as configured, and show faster plans.

    Nothing is downloaded: models are local directories or config.json files.
    """
    if os.path.lexists(output):
        raise BadInput(f"{output} exists, and an import overwrites no job; name a new file with -o.")
    require_outputs(Output("--plan", plan, OutputKind.PLAN) if plan else None, inputs=(configuration, profile))
    with limit_memory(), progress_bars() as progress:
        text, imported = import_configuration(
            configuration,
            output.parent,
            trainer=trainer,
            device=device,
            network=network,
            shapes=_model_paths(model or ()),
            changed=changed or (),
            table=read_profile(profile),
            limits=Limits(gap=gap),
            search_seconds=time_limit,
            progress=progress,
        )
    write_atomically(output, text)
    if plan and imported.plan:
        write_plan(plan, imported.plan)
    if as_json:
        typer.echo(json.dumps(_as_json(imported), indent=2))
    else:
        view_trainers.print_configuration(imported, trainer)
        typer.echo(f"{output}{f' and {plan}' if plan and imported.plan else ''}")


def _model_paths(texts: Sequence[str]) -> dict[str, Path]:
    """Return the paths of models by role; a path without a role has an empty one."""
    paths: dict[str, Path] = {}
    for text in texts:
        role, path = parse_model_path(text) if "=" in text else ("", Path(text))
        if role in paths:
            already = f"the {role} model already has" if role else "models without a role already have"
            raise BadInput(f"--model {text}: {already} {paths[role]}; give one path.")
        paths[role] = path
    return paths


def _as_json(imported: Imported) -> dict[str, object]:
    """Return the imported configuration as plain values for JSON."""
    plans = {"step_seconds": imported.plan, "within_seconds": imported.best_in_trainer, "best_seconds": imported.best}
    seconds = {name: plan.period_seconds if plan else None for name, plan in plans.items()}
    deciding = [asdict(setting) for setting in imported.deciding]
    return {
        **seconds,
        "deciding": deciding,
        "notes": imported.notes,
        "named": imported.named,
        "unread": imported.unread,
    }
