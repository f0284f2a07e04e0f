"""What a run was asked, kept beside what it wrote, so that a resume and an export know it without the user."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from meshwright.planner.plan.job import Job
from meshwright.profiles.documents import Document, canonical_json, read_json, write_atomically
from meshwright.profiles.errors import BadInput

RUN_FILE = "run.json"


class RunFile(Document):
    """The job of a run as it was given last; its plan is in `plan.json` beside it."""

    job: Job
    directory: str = Field(description="where the job's relative paths start, absolute on the node of rank 0")
    prompts: str = Field(description="SHA-256 of the encoded training prompts")


def write_run_file(out: Path, asked: RunFile) -> None:
    """Keeps what a run was asked in its directory."""
    write_atomically(out / RUN_FILE, canonical_json(asked))


def read_run_file(out: Path) -> RunFile:
    """What the run in a directory was asked. Raises BadInput where that is not kept."""
    path = out / RUN_FILE
    if not path.exists():
        raise BadInput(f"{path} does not exist, which says what the run was asked; name the directory of a run.")
    return read_json(RunFile, path, "run")
