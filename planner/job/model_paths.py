"""Directories of a job's models that differ from those in the job file, as on another machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from meshwright.planner.job.job import Job
from meshwright.profiles.errors import BadInput, suggestion
from meshwright.profiles.stages import Role


def parse_model_path(text: str) -> tuple[Role, Path]:
    """Parse `role=DIR`. Raises BadInput for another form and for a role that does not exist."""
    role, equals, path = text.partition("=")
    if not equals or not path:
        raise BadInput(f"--model {text} is not role=DIR; write it like actor=/data/models/actor.")
    if role not in set(Role):
        raise BadInput(f"--model {text}: there is no role {role!r}; {suggestion(role, [one.value for one in Role])}")
    return Role(role), Path(path)


def parse_model_paths(texts: Iterable[str]) -> Mapping[str, Path]:
    """Parse several `role=DIR`. Raises BadInput for a role that is given twice."""
    paths: dict[str, Path] = {}
    for text in texts:
        role, path = parse_model_path(text)
        if role in paths:
            raise BadInput(f"--model {text}: the {role} model already has {paths[role]}; give one path.")
        paths[role] = path
    return paths


def with_model_paths(job: Job, paths: Mapping[str, str | os.PathLike[str]], directory: Path) -> Job:
    """Return the job with the models of some roles in other directories, relative to the current directory.

    A model of another role in the same directory moves along unless it has a path of its own, and so does a tokenizer
    in that directory. The job's own paths are relative to `directory`. Raises BadInput for a role without a model.
    """
    for role in paths:
        if role not in job.models.roles:
            raise BadInput(
                f"--model {role}={paths[role]}: the job has no {role} model; its models are "
                f"{', '.join(job.models.roles)}."
            )
    places = {role: os.path.abspath(directory / job.models.source(role).path) for role in job.models.roles}
    moved = {places[Role(role)]: os.path.abspath(path) for role, path in paths.items()}
    sources = {}
    for role, place in places.items():
        if path := os.path.abspath(paths[role]) if role in paths else moved.get(place):
            sources[role.value] = job.models.source(role).model_copy(update={"path": path})
    data = job.data
    if data and (tokenizer := _moved(os.path.abspath(directory / data.tokenizer), moved)):
        data = data.model_copy(update={"tokenizer": tokenizer})
    return job.model_copy(update={"models": job.models.model_copy(update=sources), "data": data})


def _moved(path: str, moved: Mapping[str, str]) -> str | None:
    """Return the new place of a file or directory that is, or is in, one of the directories that moved."""
    for old, new in moved.items():
        if path == old or path.startswith(f"{old}{os.sep}"):
            return os.path.normpath(os.path.join(new, os.path.relpath(path, old)))
    return None


def without_model_paths(job: Job) -> Job:
    """Return the job without the places of its models and its tokenizer, to compare the jobs of machines that keep them
    in different directories."""
    sources = {role.value: job.models.source(role).model_copy(update={"path": ""}) for role in job.models.roles}
    data = job.data.model_copy(update={"tokenizer": ""}) if job.data else None
    return job.model_copy(update={"models": job.models.model_copy(update=sources), "data": data})
