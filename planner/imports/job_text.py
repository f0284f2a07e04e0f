"""The job of a configuration, as YAML: what the configuration says, and on what it is to run."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from meshwright.planner.imports.said import Configured, Word
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
    """What a job is made of beside the configuration: the file that it is in, the trainer, what generates where the
    configuration does not say, the devices, and shapes of models by role, or under an empty name for all that are not
    there."""

    path: Path
    trainer: str
    engine: EngineName
    device: str
    network: str = "ib-hdr-200"
    shapes: Mapping[str, Path] = field(default_factory=dict)

    def job(self, configured: Configured, directory: Path) -> Job:
        """The job, whose paths start at `directory`. Raises BadInput for a model that is not there."""
        return parse(Job, json.dumps(self._tree(configured, directory)), f"configuration {self.path}")

    def text(self, configured: Configured, directory: Path) -> str:
        """The YAML of the job. Raises BadInput for a model that is not there."""
        tree = self._tree(configured, directory)
        return _HEAD.format(source=self.path, trainer=self.trainer) + yaml.safe_dump(tree, sort_keys=False)

    def _tree(self, configured: Configured, directory: Path) -> dict[str, Any]:
        words = configured.words
        prompt, response = int(words["workload.prompt"]), int(words["workload.response"])
        algorithm = configured.algorithm
        reward, adapter = _group(words, "reward"), _group(words, "adapter")
        graph = graph_of(algorithm, has_ref="models.ref" in words, has_reward=not reward, has_environment=bool(reward))
        roles, own = graph.roles, SETTINGS_KEYS[algorithm]
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
            own: _group(words, own),
        }

    def _require_used(self, configured: Configured, roles: Collection[Role]) -> None:
        """Raises BadInput for shapes of a model that the job has not."""
        for role, shape in self.shapes.items():
            if not role and all(one in self.shapes or self._is_here(one, configured) for one in roles):
                raise BadInput(
                    f"--model {shape}: every model of configuration {self.path} is here or given by its role; leave it "
                    f"out, or give it in place of one as --model actor={shape}."
                )
            if role and role not in roles:
                listed = ", ".join(one.value for one in Role if one in roles)
                pays = ", for a function pays" if role == Role.REWARD and "reward.function" in configured.words else ""
                raise BadInput(
                    f"--model {role}={shape}: configuration {self.path} has no {role} model{pays}; its models are "
                    f"{listed}."
                )

    def _is_here(self, role: Role, configured: Configured) -> bool:
        named = configured.words.get(f"models.{role}")
        return named is not None and (self.path.parent / str(named)).exists()

    def _model(self, role: Role, configured: Configured) -> Path:
        """Where the shapes of a model are: as told, where the configuration says, or as told for all others."""
        if role.value in self.shapes:
            return self.shapes[role.value]
        named = configured.words.get(f"models.{role}")
        here = self.path.parent / str(named) if named else None
        if here is not None and here.exists():
            return here
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


def _group(words: Mapping[str, Word], group: str) -> dict[str, Any]:
    """The words of a group as a mapping, a level for each further dot."""
    found: dict[str, Any] = {}
    for what, value in words.items():
        first, *path = what.split(".")
        if first == group and path:
            node = found
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = value
    return found
