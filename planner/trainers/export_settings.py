"""Building blocks of an export: quantities of a plan in trainers' units, settings as text, and the reward function's
file.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from string import Template
from typing import Any

from meshwright.cost_models.cost import WEIGHTS
from meshwright.cost_models.memory_cost import ENGINE_WEIGHTS
from meshwright.planner.plan.pins import Ranks
from meshwright.planner.plan.plan import Plan
from meshwright.planner.trainers.trainer import USER_FUNCTION, ConfigValue, ExportInput, KeyValue
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.layout import unequal_layers_per_stage
from meshwright.profiles.stages import GENERATE

_MIN_SHARE, _MAX_SHARE = 0.1, 0.95
"""Bounds on the fraction of a device's memory that an export gives to the generation engine."""


def pool_nodes(plan: Plan, stage: str) -> tuple[int, int]:
    """The nodes of a stage's pool, and the ranks on each."""
    ranks, per_node = plan.choice(stage, "pool"), plan.facts.cluster.ranks_per_node
    assert isinstance(ranks, Ranks)
    nodes = max(1, ranks.num_ranks // per_node)
    return nodes, ranks.num_ranks // nodes


def token_budget(plan: Plan, stage: str) -> int:
    """Tokens of a micro-batch per context-parallel rank: its token cap or, without one, its rows at the mean length,
    and at least one row of the longest."""
    placement, workload = plan.placement(stage), plan.facts.workload
    rows = placement.schedule.micro_batch_size
    if cap := placement.schedule.micro_batch_tokens:
        return math.ceil(cap / placement.layout.cp)
    return math.ceil(max(workload.max_tokens, rows * workload.mean_tokens) / placement.layout.cp)


def token_budget_origin(plan: Plan, stage: str) -> str:
    """The field of the plan that the token budget comes from."""
    field = "micro_batch_tokens" if plan.placement(stage).schedule.micro_batch_tokens else "micro_batch_size"
    return f"placements.{stage}.schedule.{field}"


def engine_memory_share(plan: Plan) -> float:
    """The fraction of a device's memory that generation's weights and KV cache take, rounded up to hundredths."""
    placement = plan.placement(GENERATE)
    device = plan.facts.cluster.parts[plan.part_of(GENERATE)].device
    # A cache with sequences in flight stays between periods; an engine in a process has weights of its own.
    own_copy = placement.resident.amount(ENGINE_WEIGHTS) and placement.resident.amount(WEIGHTS)
    engine_bytes = placement.resident.total - own_copy + placement.transient.total
    share = math.ceil(100 * engine_bytes / device.memory_bytes) / 100
    return min(max(share, _MIN_SHARE), _MAX_SHARE)


def uneven_stage_layers(plan: Plan, stage: str) -> tuple[int, int] | None:
    """Layers of the first and the last pipeline stage; None where all stages have equally many."""
    layout, role = plan.placement(stage).layout, PPO_GRAPH.by_name[stage].role
    counts = unequal_layers_per_stage(plan.facts.models.spec(role), layout.pp)
    return (counts[0], counts[-1]) if counts else None


def mini_batch(plan: Plan) -> int:
    """Sequences of one update."""
    return plan.facts.workload.batch_size // plan.facts.workload.num_minibatches


def prompts_of_mini_batch(plan: Plan) -> int:
    """Prompts of one update, at least one."""
    return max(1, plan.facts.workload.num_prompts // plan.facts.workload.num_minibatches)


def script(head: str, command: str, arguments: Iterable[tuple[str, str]]) -> str:
    """A script that runs a command with (argument, origin) pairs; arguments of the script itself are appended."""
    lines = "".join(f"  {argument}  # {origin}\n" for argument, origin in arguments)
    comment = "".join(f"# {line}\n" for line in head.splitlines())
    return f"""\
#!/usr/bin/env bash
{comment}set -euo pipefail
arguments=(
{lines})
exec {command} "${{arguments[@]}}" "$@"
"""


def overrides(settings: Sequence[KeyValue]) -> list[tuple[str, str]]:
    """The settings as `key=value`, in hydra's form, with their origins."""
    return [(shlex.quote(f"{setting.key}={_plain(setting.value)}"), setting.origin) for setting in settings]


def flags(settings: Sequence[KeyValue]) -> list[tuple[str, str]]:
    """The settings as `--key value`, in argparse's form, with their origins. True is a bare flag; False and None are
    left out."""
    return [
        (f"--{setting.key}" if setting.value is True else f"--{setting.key} {_words(setting.value)}", setting.origin)
        for setting in settings
        if setting.value is not False and setting.value is not None
    ]


def nested_yaml(settings: Sequence[KeyValue]) -> str:
    """The settings as YAML, a level for each part of a key."""
    tree: dict[str, Any] = {}
    for setting in settings:
        *path, last = setting.key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = setting
    return "".join(_lines(tree, 0, lambda setting: f"{json.dumps(setting.value)}  # {setting.origin}"))


def _lines(tree: dict[str, Any], depth: int, render: Callable[[KeyValue], str]) -> Iterable[str]:
    for key, value in tree.items():
        indent = "  " * depth
        if isinstance(value, KeyValue):
            yield f"{indent}{key}: {render(value)}\n"
        else:
            yield f"{indent}{key}:\n"
            yield from _lines(value, depth + 1, render)


def _words(value: ConfigValue) -> str:
    """A value as shell words: one, or two for a pair."""
    return " ".join(shlex.quote(_plain(part)) for part in (value if isinstance(value, tuple) else (value,)))


def _plain(value: ConfigValue) -> str:
    """A value as written on a command line."""
    return "null" if value is None else json.dumps(value) if isinstance(value, bool) else str(value)


HOOK_MODULE = "reward_hook"
HOOK_FILE = f"{HOOK_MODULE}.py"
"""The name of the reward function's file in an export."""

_BUILT_IN: Mapping[str, str] = {
    "exact_match": "meshwright.runtime.environment.answers",
    "maths_answer": "meshwright.runtime.environment.answers",
    "unit_tests": "meshwright.runtime.environment.unit_tests",
}
"""The modules of the built-in reward functions."""

_HEAD = Template('''\
"""Calls $function for the score of a response, as $trainer expects.

The function is given a list of samples with prompt, response and answer, and returns as many scores.
"""

from dataclasses import dataclass

$imported


@dataclass(frozen=True)
class Sample:
    prompt: str
    response: str
    answer: str | None
    id: str = ""
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()


''')

_STUB = """\
def score(samples):
    raise NotImplementedError("write the function that scores samples, or name it in the job as rewards.function")"""

_HOOKS: Mapping[str, str] = {
    "verl": """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    prompt = str((extra_info or {}).get("prompt", ""))
    return float($name([Sample(prompt, solution_str, None if ground_truth is None else str(ground_truth))])[0])
""",
    "openrlhf": """\
def reward_func(queries, prompts, labels, **_):
    import torch

    samples = [
        Sample(prompt, query.removeprefix(prompt), None if label is None else str(label))
        for query, prompt, label in zip(queries, prompts, labels)
    ]
    scores = torch.tensor($name(samples), dtype=torch.float)
    return {"rewards": scores, "scores": scores, "extra_logs": {}}
""",
    "nemo-rl": """\
import ray
import torch
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn


def _text(messages, role):
    return "".join(str(message["content"]) for message in messages if message["role"] == role)


@ray.remote
class RewardEnvironment(EnvironmentInterface):
    def __init__(self, config):
        self.config = config

    def step(self, message_log_batch, metadata):
        answers = [(one or {}).get("ground_truth") for one in metadata]
        samples = [
            Sample(_text(messages, "user"), _text(messages, "assistant"), None if answer is None else str(answer))
            for messages, answer in zip(message_log_batch, answers)
        ]
        scores = torch.tensor($name(samples), dtype=torch.float)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""} for _ in samples],
            metadata=metadata,
            next_stop_strings=[None] * len(samples),
            rewards=scores,
            terminateds=torch.ones_like(scores),
        )

    def global_post_process_and_metrics(self, batch):
        return batch, {}
""",
    "skyrl": """\
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class RewardEnvironment(BaseTextEnv):
    def __init__(self, env_config=None, extras=None):
        super().__init__()
        answer = ((extras or {}).get("reward_spec") or {}).get("ground_truth")
        self.answer = None if answer is None else str(answer)
        self.prompt = ""

    def init(self, prompt):
        self.prompt = "".join(str(message["content"]) for message in prompt if message["role"] == "user")
        return prompt, {}

    def step(self, action):
        reward = float($name([Sample(self.prompt, action, self.answer)])[0])
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})
""",
    "areal": """\
def reward_fn(prompt, completions, prompt_ids, completion_ids, answer=None, **_):
    sample = Sample(str(prompt), str(completions), None if answer is None else str(answer))
    return float($name([sample])[0])
""",
    "slime": """\
async def compute_score(args, sample, **_):
    label = None if sample.label is None else str(sample.label)
    return float($name([Sample(str(sample.prompt), sample.response, label)])[0])
""",
}
"""The function or environment that each trainer calls, as in verl/utils/reward_score, OpenRLHF's
examples/scripts/reward_func.py, nemo_rl/environments/interfaces.py, slime/rollout/rm_hub, SkyRL's
skyrl_gym/envs/base_text_env.py and areal/reward of the versions that planner/trainers/data names."""


def reward_hook(trainer: str, origin: ExportInput) -> dict[str, str]:
    """The text of the reward function's file, keyed by the file's name; empty if only a reward model scores."""
    function = origin.reward_function
    if function is None:
        return {}
    module, colon, name = function.partition(":")
    if function == USER_FUNCTION:
        name, imported = "score", _STUB
    elif colon:
        imported = f"from {module} import {name}"
    else:
        name, imported = function, f"from {_BUILT_IN[function]} import {function}"
    head = _HEAD.substitute(function=function, trainer=trainer, imported=imported)
    return {HOOK_FILE: head + Template(_HOOKS[trainer]).substitute(name=name)}
