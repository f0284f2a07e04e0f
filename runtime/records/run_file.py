"""The run file: the job of a run, kept in its directory for resumes and exports."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from meshwright.planner.plan.job import Job
from meshwright.profiles.documents import Document, canonical_json, read_json, write_atomically
from meshwright.profiles.errors import BadInput

RUN_FILE = "run.json"


class RunFile(Document):
    """The job with which a run was last started or resumed; its plan is in `plan.json` beside it."""

    job: Job
    directory: str = Field(description="where the job's relative paths start, absolute on the node of rank 0")
    prompts: str = Field(description="SHA-256 of the encoded training prompts")


def write_run_file(out: Path, run_file: RunFile) -> None:
    """Write the run file into the directory of a run."""
    write_atomically(out / RUN_FILE, canonical_json(run_file))


def read_run_file(out: Path) -> RunFile:
    """Read the run file of a directory. Raises BadInput if there is none."""
    path = out / RUN_FILE
    if not path.exists():
        raise BadInput(f"{path}, which holds the job of a run, does not exist; name the directory of a run.")
    return read_json(RunFile, path, "run")
