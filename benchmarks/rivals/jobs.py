"""What both sides do: `examples/tiny`'s models, prompts and settings, with two kinds of response lengths.

`fixed`: every response has 80 tokens. Both sides are told that padding ends a response, which the actor never draws;
that all lengths are the same is checked. `tail`: a response ends as the actor ends it, after 384 tokens at most.
Learning rates are so low that lengths stay what they are.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.demo import BUILD, TINY, require_demo
from meshwright.profiles.errors import BadInput

LENGTHS: dict[str, dict[str, Any]] = {
    "fixed": {"max": 80, "fixed": 80},
    "tail": {"max": 384, "median": 35, "p99": 237},
}
"""As a job says them."""

STALENESS = 4
LEARNING_RATE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A job, in our words and in those of `trl_ppo.py`."""

    path: Path
    job: dict[str, Any]
    actor: Path

    def for_trl(self, *, steps: int, threads: int) -> dict[str, Any]:
        """The settings of one run."""
        workload, ppo = self.job["workload"], self.job["ppo"]
        return {
            "actor": str(self.actor),
            "reward": self.job["models"]["reward"]["path"],
            "tokenizer": self.job["data"]["tokenizer"],
            "prompts": self.job["data"]["prompts"],
            "batch_size": workload["batch_size"],
            "num_minibatches": workload["num_minibatches"],
            "num_epochs": workload["num_epochs"],
            "longest_response": workload["response"]["max"],
            "ends": "fixed" not in workload["response"],
            "learning_rate": LEARNING_RATE,
            "kl_coefficient": ppo["kl_coefficient"],
            "gae_lambda": ppo["gae_lambda"],
            "steps": steps,
            "threads": threads,
            "seed": ppo.get("seed", 0),
        }


def shared(name: str, directory: Path) -> Shared:
    """Writes the job of these lengths, and its actor, into `directory`.

    Raises BadInput without the demo's models, and for a directory that has the runs of another call.
    """
    require_demo()
    if directory.exists():
        raise BadInput(f"{directory} has the runs of another call, which are not mixed; give another --out.")
    directory.mkdir(parents=True)
    actor = directory / "actor"
    shutil.copytree(BUILD / "actor", actor)
    if "fixed" in LENGTHS[name]:
        _end_with_padding(actor)
    job: dict[str, Any] = yaml.safe_load((TINY / "job.yaml").read_text(encoding="utf-8"))
    paths = {"actor": actor, "ref": actor, "critic": BUILD / "reward", "reward": BUILD / "reward"}
    job["models"] = {role: {"path": str(path)} for role, path in paths.items()}
    job["data"] = {"prompts": str(BUILD / "prompts.jsonl"), "tokenizer": str(BUILD / "tokenizer")}
    job["workload"] |= {"response": LENGTHS[name], "num_epochs": 1}
    job["ppo"] |= {"actor_learning_rate": LEARNING_RATE, "critic_learning_rate": LEARNING_RATE}
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(job | {"staleness": STALENESS}), encoding="utf-8")
    return Shared(path=path, job=job, actor=actor)


def _end_with_padding(actor: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        config = json.loads((actor / name).read_text(encoding="utf-8"))
        config["eos_token_id"] = config["pad_token_id"]
        (actor / name).write_text(json.dumps(config), encoding="utf-8")
