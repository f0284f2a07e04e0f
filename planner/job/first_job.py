"""The commented YAML text of a first job, from one model, a device by name and a few numbers."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshwright.planner.job.job import SETTINGS_KEYS, Job, resolve
from meshwright.planner.job.sections import holds_language_model
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.documents import parse_yaml
from meshwright.profiles.errors import BadInput
from meshwright.profiles.hardware import device_name, network_named, usual_network

_RANKS_PER_NODE = 8
_GROUP_SIZE = 8

_MODELS = {
    "ppo": """\
  actor: {{path: {path}}}
  critic: {{path: {path}}}  # with a value head; often the reward model's directory
  ref: {{path: {path}}}
  reward: {{path: {scalar_path}}}{scalar_note}
""",
    "group": """\
  actor: {{path: {path}}}
  ref: {{path: {path}}}  # for the KL penalty; leave it out with a kl_coefficient of 0
""",
    "distill": """\
  actor: {{path: {path}}}  # the student
  teacher: {{path: {path}}}  # usually a larger model with the same vocabulary
""",
}
_REWARDS = """\
rewards:  # functions and judges that score responses; or a reward model, as models.reward
  - {name: maths, function: maths_answer, latency_seconds: {fixed: 0.005}}  # or your own, as module:function
"""


@dataclass(frozen=True, kw_only=True)
class FirstJob:
    """The inputs of a first job.

    `model` is a Hugging Face directory or a config.json, used for all roles. `batch_size` counts prompts, whereas that
    of a job counts responses. `prompt` and `response` are maximum lengths in tokens. `network` is by default the
    device's usual one.
    """

    algorithm: Algorithm = "ppo"
    model: Path
    device: str
    num_ranks: int = _RANKS_PER_NODE
    network: str | None = None
    batch_size: int
    prompt: int
    response: int

    def text(self, directory: Path) -> str:
        """Return the YAML of the job, whose paths are relative to `directory`.

        Raises BadInput for an unknown model, device or network, an illegal number, and ranks that are neither whole
        nodes of 8 nor fewer than 8.
        """
        if self.network:
            network_named(self.network)  # which a job of one node does not name
        text = self._text(directory)
        job = parse_yaml(Job, text, "job")
        resolve(job, directory)
        return text

    def _text(self, directory: Path) -> str:
        path = json.dumps(os.path.relpath(self.model, directory))
        scalar_path, scalar_note = path, ""
        if holds_language_model(self.model):  # whose weights have no scalar head, so only its shape can be used
            scalar_path = json.dumps(os.path.relpath(self.model / "config.json", directory))
            scalar_note = "  # its shape, to plan with; `meshwright run` needs a model with a scalar head"
        nodes, ranks_per_node = self._cluster_shape()
        network = self.network or usual_network(self.device)
        fabric = f"\n  network: {json.dumps(network)}  # between nodes; `meshwright devices` lists them"
        device = self.device if self.device == "local" else device_name(self.device)
        algorithm_line = "" if self.algorithm == "ppo" else f"algorithm: {self.algorithm}\n"
        rewards = _REWARDS if self._template == "group" else ""
        return f"""\
# An RLHF job under {self.algorithm}. `meshwright fit` says how many devices it needs, `meshwright plan` finds its
# fastest plan, and `meshwright schema job` has every key.
{algorithm_line}models:  # each a Hugging Face directory or, when only planning, a config.json
{_MODELS[self._template].format(path=path, scalar_path=scalar_path, scalar_note=scalar_note)}cluster:
  device: {json.dumps(device)}  # `meshwright devices` lists them; local is this machine
  nodes: {nodes}
  ranks_per_node: {ranks_per_node}{fabric if nodes > 1 else ""}
precision: {"fp32" if self.device == "local" else "bf16"}
workload:
{self._batch()}  prompt: {{max: {self.prompt}, fixed: {self.prompt}}}  # tokens
  response: {{max: {self.response}, fixed: {self.response}}}  # \
every response has the maximum length; give median and p99 for a distribution
  num_minibatches: 1  # updates in a pass over the batch
  num_epochs: 1  # passes over the batch
staleness: 0  # largest number of updates between sampling a token and training on it;
              # 1 or more lets generation work ahead of the training
{rewards}# {SETTINGS_KEYS[self.algorithm]}: learning rates, clipping, sampling; the schema lists the defaults
# data: {{prompts: prompts.jsonl, tokenizer: tokenizer}}  # needed by `meshwright run`
"""

    @property
    def _template(self) -> Literal["ppo", "group", "distill"]:
        match self.algorithm:
            case "ppo" | "distill" as name:
                return name
            case _:
                return "group"

    def _batch(self) -> str:
        if self._template != "group":
            return f"  batch_size: {self.batch_size}  # prompts in a step, with one response each\n"
        return (
            f"  batch_size: {self.batch_size * _GROUP_SIZE}  # responses in a step\n"
            f"  group_size: {_GROUP_SIZE}  # responses for each prompt\n"
        )

    def _cluster_shape(self) -> tuple[int, int]:
        nodes, rest = divmod(self.num_ranks, _RANKS_PER_NODE)
        if nodes and rest:
            hint = f"{nodes * _RANKS_PER_NODE} or {(nodes + 1) * _RANKS_PER_NODE}"
            raise BadInput(f"{self.num_ranks} devices are not whole nodes of {_RANKS_PER_NODE}; use {hint}.")
        return (nodes, _RANKS_PER_NODE) if nodes else (1, self.num_ranks)
