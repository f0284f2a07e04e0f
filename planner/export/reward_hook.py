"""The Python file through which a trainer calls a job's reward function."""

from __future__ import annotations

from collections.abc import Mapping
from string import Template

from meshwright.planner.export.trainer import USER_FUNCTION, ExportInput

HOOK_FILE = "reward_hook.py"
"""The name of the file in an export."""

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
    "slime": """\
async def compute_score(args, sample, **_):
    label = None if sample.label is None else str(sample.label)
    return float($name([Sample(str(sample.prompt), sample.response, label)])[0])
""",
}
"""The function that each trainer calls, as in verl/utils/reward_score, OpenRLHF's examples/scripts/reward_func.py and
slime/rollout/rm_hub of the versions that `data` names."""


def reward_hook(trainer: str, origin: ExportInput) -> dict[str, str]:
    """The text of the file by its name; empty where a reward model scores."""
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
