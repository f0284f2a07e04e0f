"""The job of an imported configuration, as YAML: the fields of the configuration, and the hardware it runs on."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from meshwright.planner.imports.said import FieldValue, ParsedConfig
from meshwright.planner.plan.job import SETTINGS_KEYS, Job
from meshwright.profiles.algorithms import graph_of
from meshwright.profiles.documents import parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import EngineName
from meshwright.profiles.stages import Role

_HEAD = """\
# From {source}, a configuration of {trainer}.
# Its lengths are the longest that it allows, each of them: give median and p99 in place of fixed where they are known.
# Its engine is the trainer's: leave it out to plan for the one of Meshwright.
"""


@dataclass(frozen=True, kw_only=True)
class JobSource:
    """The inputs of a job besides the configuration's fields.

    `path` is the configuration's file, `engine` the one where the configuration names none, and `shapes` the models'
    directories or config.json files by role; one under an empty name is for all models that are not here.
    """

    path: Path
    trainer: str
    engine: EngineName
    device: str
    network: str = "ib-hdr-200"
    shapes: Mapping[str, Path] = field(default_factory=dict)

    def job(self, configured: ParsedConfig, directory: Path) -> Job:
        """The job, with paths relative to `directory`. Raises BadInput for a model that is not here."""
        return parse(Job, json.dumps(self._tree(configured, directory)), f"configuration {self.path}")

    def text(self, configured: ParsedConfig, directory: Path) -> str:
        """The YAML of the job, with paths relative to `directory`. Raises BadInput for a model that is not here."""
        tree = self._tree(configured, directory)
        return _HEAD.format(source=self.path, trainer=self.trainer) + yaml.safe_dump(tree, sort_keys=False)

    def _tree(self, configured: ParsedConfig, directory: Path) -> dict[str, Any]:
        words = configured.by_name
        prompt, response = int(words["workload.prompt"]), int(words["workload.response"])
        algorithm = configured.algorithm
        reward, adapter = _group(words, "reward"), _group(words, "adapter")
        graph = graph_of(algorithm, has_ref="models.ref" in words, has_reward=not reward, has_environment=bool(reward))
        roles, settings_key = graph.roles, SETTINGS_KEYS[algorithm]
        self._require_used(configured, roles)
        return {
            **({} if algorithm == "ppo" else {"algorithm": algorithm}),
            "models": {
                role.value: {
                    "path": os.path.relpath(self._model(role, configured), directory),
                    **({"adapter": adapter} if adapter and role == Role.ACTOR else {}),
                }
                for role in Role
                if role in roles
            },
            "cluster": {
                "device": self.device,
                "nodes": words["cluster.nodes"],
                "ranks_per_node": words["cluster.ranks_per_node"],
                "network": self.network,
            },
            "precision": "bf16",
            "engine": words.get("engine", self.engine),
            **({"generation_weights": words["generation_weights"]} if "generation_weights" in words else {}),
            **({"rewards": [reward]} if reward else {}),
            "workload": {
                "batch_size": words["workload.batch_size"],
                "group_size": words.get("workload.group_size", 1),
                "prompt": {"max": prompt, "fixed": prompt},
                "response": {"max": response, "fixed": response},
                "num_minibatches": words["workload.num_minibatches"],
                "num_epochs": words.get("workload.num_epochs", 1),
            },
            "staleness": configured.steps_ahead,
            settings_key: _group(words, settings_key),
        }

    def _require_used(self, configured: ParsedConfig, roles: Collection[Role]) -> None:
        """Raise BadInput for shapes of a model that the job does not have."""
        for role, shape in self.shapes.items():
            if not role and all(needed in self.shapes or self._is_here(needed, configured) for needed in roles):
                raise BadInput(
                    f"--model {shape}: every model of configuration {self.path} is here or given by its role; leave it "
                    f"out, or give it in place of one as --model actor={shape}."
                )
            if role and role not in roles:
                listed = ", ".join(known.value for known in Role if known in roles)
                reason = (
                    ", because a function scores"
                    if role == Role.REWARD and "reward.function" in configured.by_name
                    else ""
                )
                raise BadInput(
                    f"--model {role}={shape}: configuration {self.path} has no {role} model{reason}; its models are "
                    f"{listed}."
                )

    def _is_here(self, role: Role, configured: ParsedConfig) -> bool:
        named = configured.by_name.get(f"models.{role}")
        return named is not None and (self.path.parent / str(named)).exists()

    def _model(self, role: Role, configured: ParsedConfig) -> Path:
        """The directory or config.json of a model: the user's for its role, the configuration's, or the user's for all
        others."""
        if role.value in self.shapes:
            return self.shapes[role.value]
        named = configured.by_name.get(f"models.{role}")
        local = self.path.parent / str(named) if named else None
        if local is not None and local.exists():
            return local
        if "" in self.shapes and named is not None:
            return self.shapes[""]
        if named is None:
            raise BadInput(
                f"configuration {self.path} has no {role} model, and a job has one; give the shapes of one, as "
                f"--model {role}=PATH of a Hugging Face directory or a config.json."
            )
        raise BadInput(
            f"the {role} model {named} of configuration {self.path} is not here, and nothing is fetched; give its "
            "directory or its config.json as --model PATH."
        )


def _group(values: Mapping[str, FieldValue], group: str) -> dict[str, Any]:
    """The fields of a group as a nested mapping, a level for each further dot."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        prefix, *path = name.split(".")
        if prefix == group and path:
            node = tree
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = value
    return tree
