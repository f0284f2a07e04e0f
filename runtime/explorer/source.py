"""What is explored: a job, or the job of a plan; its facts under a state, and a state written as a job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from meshwright.planner.job.engine_limits import engines_of
from meshwright.planner.job.job import Facts, Job
from meshwright.planner.job.whatif_settings import parse_settings, with_setting
from meshwright.planner.plan.plan import Plan, read_plan
from meshwright.planner.plan.verify import require_valid
from meshwright.profiles.documents import parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import EngineName
from meshwright.profiles.table import Table
from meshwright.runtime.api.files import read_job, read_table, resolve
from meshwright.runtime.explorer.state import State

_JOB_KEYS = {"cluster.inter_node": "cluster.network"}
"""Paths in the facts that a job has under another key."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The facts of a job file, or of a plan file with its pins; `job` is None for a plan,
    and `plan` for a job. `table` is that of the file `profile`, and `gap` the one at which searches end."""

    path: Path
    facts: Facts
    job: Job | None
    plan: Plan | None
    pins: tuple[str, ...]
    table: Table | None
    profile: Path | None
    gap: float | None

    @property
    def options(self) -> tuple[str, ...]:
        """The options of the command line that searches depend on: the table of costs, and the gap."""
        profile = () if self.profile is None else ("--profile", str(self.profile))
        return profile if self.gap is None else (*profile, "--gap", f"{self.gap:g}")

    def facts_of(self, state: State) -> Facts:
        """The facts with the fields of a state. Raises BadInput for an unknown field, naming the nearest, and for a
        value that breaks a rule."""
        return with_setting(self.facts, state.values) if state.settings else self.facts

    def require_known_fields(self, state: State) -> None:
        """Raises BadInput for the first value of a state, or of its grid, that no job of this kind can have.

        A value of the grid is tried alone, since a combination may break a rule that others keep.
        """
        self.facts_of(state)
        for path, texts in state.grid:
            for text in texts:
                (setting,) = parse_settings([f"{path}={text}"])
                with_setting(self.facts, setting)

    def engines_for(self, state: State) -> tuple[EngineName, ...]:
        """The engines among which the plan of a state chooses."""
        return engines_of(self.job, self.facts_of(state)) if self.job else ()

    def job_text(self, state: State) -> str:
        """The YAML of a job with the fields of a state, for a file beside the job.

        Raises BadInput where a plan is explored, and for a field that the job cannot state.
        """
        if self.job is None:
            raise BadInput(f"{self.path} is a plan, which does not have the keys of its job; explore the job.yaml.")
        tree = self.job.model_dump(mode="json", exclude_unset=True)
        facts = self.facts_of(state)
        named = {path: value for path, value in state.values.items() if isinstance(value, str)}
        for path, _ in state.settings:
            _assign(tree, path, facts, named.get(path))
        if "cluster.device" in named and "network" not in tree["cluster"]:
            _assign(tree, "cluster.inter_node", facts, None)
        changes = ", ".join(f"{path}={text}" for path, text in state.settings) or "no changes"
        described = f"{self.path.name} with {changes}"
        changed = parse(Job, json.dumps(tree), described)
        if resolve(changed, self.path.parent, self.table) != facts:
            raise BadInput(f"a job has no keys for {described}; change the fields of the job itself.")
        return f"# {described}. Paths are relative to this file.\n{yaml.safe_dump(tree, sort_keys=False)}"


def read_source(path: Path, *, profile: Path | None = None, gap: float | None = None) -> Source:
    """Read a job.yaml, or a plan.json. Raises BadInput for any other file, and for a plan that breaks a rule."""
    table = read_table(profile) if profile else None
    if path.suffix == ".json":
        plan = read_plan(path)
        require_valid(plan)
        facts, pins = plan.facts, plan.pins
        return Source(path=path, facts=facts, job=None, plan=plan, pins=pins, table=table, profile=profile, gap=gap)
    job = read_job(path)
    facts = resolve(job, path.parent, table)
    return Source(path=path, facts=facts, job=job, plan=None, pins=(), table=table, profile=profile, gap=gap)


def _assign(tree: dict[str, Any], path: str, facts: Facts, name: str | None) -> None:
    """Set a key of a job, in place, to this name, or else to what the facts have at this path; lengths are set as a
    whole."""
    if not isinstance(tree.get("cluster", {}), dict):
        tree["cluster"] = {"device": tree["cluster"]}
    if path.endswith(".scale"):
        path = path.removesuffix(".scale")
    value: Any = json.loads(facts.model_dump_json())
    for key in path.split("."):
        value = value[int(key) if isinstance(value, list) else key]
    *parents, last = _JOB_KEYS.get(path, path).split(".")
    node: Any = tree
    for key in parents:
        node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
    node[last] = name if name is not None else _without_nothing(value)


def _without_nothing(value: Any) -> Any:
    """A value without the keys of an object that are null, which are its defaults."""
    if isinstance(value, Mapping):
        return {name: _without_nothing(member) for name, member in value.items() if member is not None}
    return value
