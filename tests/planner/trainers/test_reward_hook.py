"""A reward that is a function goes to a trainer by its own hook, and comes back from there."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.planner.job.job import Facts, RoleModels
from meshwright.planner.job.rewards_and_tools import Reward
from meshwright.planner.solver.result import Limits
from meshwright.planner.trainers.exporter import Exported, best_expressible_plan, export
from meshwright.planner.trainers.registry import READERS, TRAINERS
from meshwright.profiles.errors import BadInput
from tests.planner.drawn import model_of
from tests.planner.trainers.plans import facts_of
from tests.planner.trainers.written import FILES

HOOKED = ("verl", "nemo-rl", "openrlhf", "slime", "skyrl", "areal")


def paid_by_a_function(*rewards: Reward) -> Facts:
    """A small job of GRPO without a reward model."""
    facts = facts_of(algorithm="grpo")
    rewards = rewards or (Reward(name="verifier", function="reward:score"),)
    models, loads = RoleModels(actor=facts.models.actor), tuple(reward.load for reward in rewards)
    return facts.model_copy(update={"models": models, "rewards": loads})


def exported_to(name: str) -> Exported:
    trainer = TRAINERS[name]
    facts = trainer.with_engine(paid_by_a_function())
    best = best_expressible_plan(trainer, facts, model_of(facts), limits=Limits(gap=0.3))
    assert best is not None
    found = export(trainer, best.plan, model_of)
    assert found is not None
    return found


@pytest.mark.parametrize("name", HOOKED)
def test_a_function_goes_to_a_trainer_and_comes_back(tmp_path: Path, name: str) -> None:
    found = exported_to(name)
    assert found.inexpressible == ()
    for file, text in found.files.items():
        (tmp_path / file).write_text(text)
    again = READERS[name].read(tmp_path / FILES[name])
    assert again.by_name["algorithm"] == "grpo"
    assert again.by_name["reward.function"] == "reward:score"
    assert "models.reward" not in again.by_name
    assert all("the engine is costed with the defaults" in reason for reason in again.unmodelled.values())


def test_the_hook_of_verl_and_slime_gives_the_function_a_sample_and_the_trainer_its_score() -> None:
    @dataclass
    class Drawn:
        prompt: str
        response: str
        label: object

    for name in ("verl", "slime"):
        own: dict[str, Any] = {}
        exec(exported_to(name).files["reward_hook.py"], own)
        with pytest.raises(NotImplementedError, match=r"rewards\.function"):
            own["score"]([])
        own["score"] = lambda samples: [len(samples[0].response) + (samples[0].answer == "4")]
        hook = own["compute_score"]
        if name == "verl":
            assert hook("maths", "abc", 4, {"prompt": "2 + 2"}) == 4.0
        else:
            assert asyncio.run(hook(None, Drawn("2 + 2", "abc", "4"))) == 4.0


NEMO_RL = {
    "ray/__init__.py": "def remote(actor):\n    return actor\n",
    "nemo_rl/__init__.py": "",
    "nemo_rl/distributed/__init__.py": "",
    "nemo_rl/distributed/ray_actor_environment_registry.py": "ACTOR_ENVIRONMENT_REGISTRY = {}\n",
    "nemo_rl/distributed/virtual_cluster.py": "class PY_EXECUTABLES:\n    SYSTEM = 'python'\n",
    "nemo_rl/environments/__init__.py": "",
    "nemo_rl/environments/interfaces.py": """\
from collections import namedtuple

class EnvironmentInterface: ...

EnvironmentReturn = namedtuple(
    "EnvironmentReturn", "observations metadata next_stop_strings rewards terminateds answers", defaults=[None]
)
""",
    "nemo_rl/environments/utils.py": """\
ENV_REGISTRY = {}

def register_env(env_name, actor_class_fqn):
    ENV_REGISTRY[env_name] = actor_class_fqn
""",
    "examples/run_grpo.py": """\
import importlib
import os
import sys

from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.environments.utils import ENV_REGISTRY

(actor,) = ENV_REGISTRY.values()
module, _, name = actor.rpartition(".")
getattr(importlib.import_module(module), name)({})
assert ACTOR_ENVIRONMENT_REGISTRY[actor] == "python"
print(sys.argv, os.environ["PYTHONPATH"].split(":")[0], *ENV_REGISTRY)
""",
}
"""What an export needs of NeMo-RL's repository, in a few lines."""


def test_nemo_rl_is_run_with_an_environment_that_calls_the_function(tmp_path: Path) -> None:
    exported, repository = tmp_path / "exported", tmp_path / "repository"
    exported.mkdir()
    for file, text in exported_to("nemo-rl").files.items():
        (exported / file).write_text(text)
    for file, text in NEMO_RL.items():
        (repository / file).parent.mkdir(parents=True, exist_ok=True)
        (repository / file).write_text(text)
    assert 'env_name: "reward_hook"' in (exported / "config.yaml").read_text()
    assert "run_with_reward.py" in (exported / "run.sh").read_text()
    command = [sys.executable, str(exported / "run_with_reward.py"), "--config", "c.yaml"]
    done = subprocess.run(
        command,
        cwd=repository,
        env={"PYTHONPATH": str(repository), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == f"['examples/run_grpo.py', '--config', 'c.yaml'] {exported} reward_hook"


def test_the_environment_gives_the_function_a_sample_and_nemo_rl_its_score(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces = SimpleNamespace(EnvironmentInterface=object, EnvironmentReturn=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(remote=lambda actor: actor))
    monkeypatch.setitem(sys.modules, "nemo_rl.environments.interfaces", interfaces)
    own: dict[str, Any] = {}
    exec(exported_to("nemo-rl").files["reward_hook.py"], own)
    own["score"] = lambda samples: [
        len(sample.response) + (sample.answer == "4") + (sample.prompt == "2 + 2") for sample in samples
    ]
    messages = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "abc"}]
    found = own["RewardEnvironment"]({}).step([messages, messages], [{"ground_truth": 4}, None])
    assert found.rewards.tolist() == [5.0, 4.0]
    assert found.terminateds.tolist() == [1.0, 1.0]
    assert torch.is_tensor(found.rewards)


SKYRL = {
    "ray/__init__.py": """\
def get(made):
    return made


def remote(**_):
    def wrap(function):
        function.remote = function
        return function

    return wrap
""",
    "skyrl/__init__.py": "",
    "skyrl/train/__init__.py": "",
    "skyrl/train/config.py": """\
class SkyRLTrainConfig:
    @classmethod
    def from_cli_overrides(cls, overrides):
        return overrides
""",
    "skyrl/train/utils.py": "def validate_cfg(config): ...\n\n\ndef initialize_ray(config): ...\n",
    "skyrl/train/entrypoints/__init__.py": "",
    "skyrl/train/entrypoints/main_base.py": """\
import importlib

from skyrl_gym.envs import ENVIRONMENTS

class BasePPOExp:
    def __init__(self, config):
        self.config = config

    def run(self):
        module, _, name = ENVIRONMENTS["reward_hook"].partition(":")
        made = getattr(importlib.import_module(module), name)(extras={"reward_spec": {"ground_truth": 4}})
        prompt, _ = made.init([{"role": "user", "content": "2 + 2"}])
        importlib.import_module(module).score = lambda samples: [
            len(sample.response) + (sample.answer == "4") + (sample.prompt == "2 + 2") for sample in samples
        ]
        print(self.config, made.step("abc"))
""",
    "skyrl_gym/__init__.py": "",
    "skyrl_gym/envs/__init__.py": """\
ENVIRONMENTS = {}

def register(id, entry_point):
    ENVIRONMENTS[id] = entry_point
""",
    "skyrl_gym/envs/base_text_env.py": "class BaseTextEnv: ...\n\n\nBaseTextEnvStepOutput = dict\n",
}
"""What an export needs of SkyRL, in a few lines."""


def test_skyrl_is_run_with_an_environment_that_gives_the_function_a_sample_and_skyrl_its_score(tmp_path: Path) -> None:
    exported, installed = tmp_path / "exported", tmp_path / "installed"
    exported.mkdir()
    for file, text in exported_to("skyrl").files.items():
        (exported / file).write_text(text)
    for file, text in SKYRL.items():
        (installed / file).parent.mkdir(parents=True, exist_ok=True)
        (installed / file).write_text(text)
    assert "environment.env_class=reward_hook" in (exported / "run.sh").read_text()
    done = subprocess.run(
        [sys.executable, str(exported / "run_with_reward.py"), "trainer.seed=1"],
        env={"PYTHONPATH": str(installed), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = {"observations": [], "reward": 5.0, "done": True, "metadata": {}}
    assert done.stdout.strip() == f"['trainer.seed=1'] {expected}"


def test_what_no_hook_can_say_is_refused() -> None:
    judge = Reward(name="judge", url="https://judge.example/score")
    two = (Reward(name="one", function="a:b"), Reward(name="two", function="a:c"))
    for name in HOOKED:
        with pytest.raises(BadInput, match=r"judges behind a URL \(judge\)"):
            TRAINERS[name].require_expressible(paid_by_a_function(judge))
        with pytest.raises(BadInput, match=r"several rewards together \(one, two\)"):
            TRAINERS[name].require_expressible(paid_by_a_function(*two))
