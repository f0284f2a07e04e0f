"""The command that makes a workload from agent rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml

from meshwright.runtime.api.job_inputs import agent_workload

EXAMPLES = """Example: meshwright rollouts trajectories.jsonl --tokenizer models/qwen3-32b

A line of the file is a rollout: {"messages": [{"role": "user", "content": ...}, {"role": "assistant", ...}, ...]}
"""


def rollouts(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="JSON lines of chat messages.")],
    *,
    tokenizer: Annotated[Path, typer.Option(help="The tokenizer.json, or its directory, to count tokens with.")],
) -> None:
    """Print the lengths, turns and latencies of agent rollouts as the workload of a job."""
    workload = agent_workload(trace, tokenizer)
    typer.echo(yaml.safe_dump({"workload": workload}, sort_keys=False, default_flow_style=None, width=100).rstrip())
