"""The command that writes a first job from a model, a device and three numbers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.documents import write_atomically
from meshwright.profiles.errors import BadInput
from meshwright.runtime.api.job_inputs import first_job

EXAMPLES = """Example: meshwright init Llama-3.1-8B --device h100-sxm --batch 512 --prompt 1024 --response 2048

then: meshwright plan job.yaml -o plan.json
"""

_MAX_NUMBER = 2**20


def init(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face directory, or a config.json.")],
    *,
    device: Annotated[str, typer.Option(help="A device of `meshwright devices`, or local.")],
    batch: Annotated[
        int, typer.Option(min=1, max=_MAX_NUMBER, help="Prompts per step; grpo and the like sample each 8 times.")
    ],
    prompt: Annotated[int, typer.Option(min=1, max=_MAX_NUMBER, help="Length limit of prompts, in tokens.")],
    response: Annotated[int, typer.Option(min=1, max=_MAX_NUMBER, help="Length limit of responses, in tokens.")],
    gpus: Annotated[
        int, typer.Option(min=1, max=_MAX_NUMBER, help="Number of devices: whole nodes of 8, or part of one.")
    ] = 8,
    network: Annotated[
        str | None,
        typer.Option(help="The network between nodes, of `meshwright devices`; by default the device's usual one."),
    ] = None,
    algorithm: Annotated[Algorithm, typer.Option(help="The RL algorithm.")] = "ppo",
    price: Annotated[
        float | None,
        typer.Option(min=0, help="Price of a GPU-hour, in any currency, for the command that plans the job."),
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Write the job here; a new file.")] = Path("job.yaml"),
) -> None:
    """Write a first job with a comment on every line; it can be planned as it is."""
    if os.path.lexists(output):
        raise BadInput(f"{output} exists, and a first job overwrites nothing; name a new file with -o.")
    if not output.parent.is_dir():
        raise BadInput(f"-o {output}: there is no directory {output.parent}; make it, or name another file.")
    text = first_job(
        model,
        output.parent,
        device=device,
        num_ranks=gpus,
        network=network,
        batch_size=batch,
        prompt=prompt,
        response=response,
        algorithm=algorithm,
    )
    write_atomically(output, text)
    money = "" if price is None else f" --price {price:.12g}"
    typer.echo(f"{output}; next: meshwright plan {output} -o {output.with_name('plan.json')}{money}")
