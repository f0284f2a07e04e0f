"""Rules for changing the job of a resumed run, one for every field.

A field that may change takes effect; a change of any other is refused. All facts of a plan come from the job, so
whatever only the plan decides may change.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from meshwright.planner.plan.job import DEFAULT_SETTINGS, Job
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.differences import Difference, differences
from meshwright.profiles.documents import digest
from meshwright.profiles.errors import BadInput
from meshwright.runtime.generation.in_flight_state import SamplingDigests
from meshwright.runtime.records.run_file import RunFile


class Effect(Enum):
    """The time at which a changed field of the job takes effect, if it does."""

    AT_ONCE = "from the first step that is resumed on"
    RESAMPLE = "at once; responses in flight are dropped and sampled again"
    IF_SAME_PROMPTS = "at once, as long as the encoded training prompts stay what they are"
    NONE = "it may not change"


@dataclass(frozen=True)
class Rule:
    """The effect of changing a field of the job, and the reason if it may not change."""

    effect: Effect
    reason: str = ""


_AT_ONCE, _RESAMPLE, _SAME_PROMPTS = Rule(Effect.AT_ONCE), Rule(Effect.RESAMPLE), Rule(Effect.IF_SAME_PROMPTS)

_SETTING_RULES = {
    "actor_learning_rate": _AT_ONCE,
    "critic_learning_rate": _AT_ONCE,
    "actor_schedule": _AT_ONCE,
    "critic_schedule": _AT_ONCE,
    "adam_beta1": _AT_ONCE,
    "adam_beta2": _AT_ONCE,
    "adam_eps": _AT_ONCE,
    "max_grad_norm": _AT_ONCE,
    "weight_decay": _AT_ONCE,
    "clip_ratio": _AT_ONCE,
    "clip_ratio_high": _AT_ONCE,
    "target_kl": _AT_ONCE,
    "value_clip": _AT_ONCE,
    "kl_coefficient": _AT_ONCE,
    "gamma": _AT_ONCE,
    "gae_lambda": _AT_ONCE,
    "entropy_coefficient": _AT_ONCE,
    "whiten_advantages": _AT_ONCE,
    "normalise_by_std": _AT_ONCE,
    "group_baseline": _AT_ONCE,
    "loss_mean": _AT_ONCE,
    "overlong_tokens": _AT_ONCE,
    "overlong_penalty": _AT_ONCE,
    "teacher_weights": _AT_ONCE,
    "reward_scale": _AT_ONCE,
    "reward_clip": _AT_ONCE,
    "truncation": _AT_ONCE,
    "missing_end_score": _AT_ONCE,
    "missing_end_penalty": _AT_ONCE,
    "importance_cap": _AT_ONCE,
    "max_bad_steps": _AT_ONCE,
    "temperature": _RESAMPLE,
    "top_k": _RESAMPLE,
    "top_p": _RESAMPLE,
    "stop": _RESAMPLE,
    "seed": Rule(Effect.NONE, "the order of the prompts and the samples of every step follow from it"),
}
"""Rules of the settings of algorithms, by name; an algorithm has some of them."""

RULES = MappingProxyType(
    {
        "algorithm": Rule(Effect.NONE, "the stages of a step and the models in the checkpoint follow from it"),
        "models": Rule(Effect.NONE, "the weights in the checkpoint are those of its models"),
        "cluster": _AT_ONCE,
        "precision": Rule(Effect.NONE, "the weights in the checkpoint have it"),
        "workload.batch_size": Rule(Effect.NONE, "the prompts of a step are found by it"),
        "workload.group_size": Rule(Effect.NONE, "the prompts of a step are found by it"),
        "workload.best_of": Rule(Effect.NONE, "the samples of a step are numbered by it"),
        "workload.prompt": _SAME_PROMPTS,
        "workload.response": _AT_ONCE,
        "workload.turns": _AT_ONCE,
        "workload.dynamic_sampling": Rule(Effect.NONE, "which prompts come next follows from it"),
        "workload.dynamic_sampling.acceptance": _AT_ONCE,
        "workload.dynamic_sampling.histogram": _AT_ONCE,
        "workload.dynamic_sampling.num_prompts": _AT_ONCE,
        "workload.num_minibatches": _AT_ONCE,
        "workload.num_epochs": _AT_ONCE,
        "staleness": _AT_ONCE,
        "controllers": _AT_ONCE,
        "cache_after_refit": _AT_ONCE,
        "engine": _AT_ONCE,
        "generation_weights": _AT_ONCE,
        "rewards": _AT_ONCE,
        "reward_model_weight": _AT_ONCE,
        "tool": _AT_ONCE,
        **{
            f"{key}.{name}": rule
            for key, settings in DEFAULT_SETTINGS.items()
            for name, rule in _SETTING_RULES.items()
            if name in type(settings).model_fields
        },
        "data": _SAME_PROMPTS,  # where the recorded job has no data
        "data.prompts": _SAME_PROMPTS,
        "data.held_out": _AT_ONCE,
        "data.tokenizer": _SAME_PROMPTS,
        "data.long_prompts": _SAME_PROMPTS,
        "data.columns": _SAME_PROMPTS,
        "data.split": _SAME_PROMPTS,
        "data.held_out_split": _AT_ONCE,
        "data.chat": _SAME_PROMPTS,
        "evaluation.every_steps": _AT_ONCE,
    }
)
"""Rules by key of the job. A rule covers all keys below its own."""


def rule_of(key: str) -> Rule | None:
    """Return the rule of a key or of the nearest key above it."""
    while key and key not in RULES:
        key = key.rpartition(".")[0]
    return RULES.get(key)


def changes(before: RunFile, now: RunFile) -> tuple[Difference, ...]:
    """Return the fields of the job that a resume changes. Raises BadInput for one that may not change."""
    changed = differences(before.job, now.job)
    for change in sorted(changed, key=lambda change: change.key != "algorithm"):  # other algorithms' settings: no rule
        rule = rule_of(change.key)
        assert rule is not None, change.key
        if rule.effect is Effect.NONE:
            raise BadInput(
                f"--resume: {change.describe('the run so far', 'the job')}, and cannot change: {rule.reason}; give the "
                "job its old value back, or start a new run in another --out."
            )
    if before.prompts != now.prompts:
        raise BadInput(
            "--resume: the training prompts are not those of the run so far, and which of them a step sees follows "
            "from all of them; give it the same prompts, tokenizer and prompt.max, or start a new run in another --out."
        )
    return changed


def sampling_digests(plan: Plan, job: Job) -> SamplingDigests:
    """Return digests of the plan and of the sampling settings; responses in flight are dropped if the latter change."""
    settings = job.settings.model_dump(mode="json")
    sampling = {key: settings[key] for key, rule in _SETTING_RULES.items() if rule.effect is Effect.RESAMPLE}
    return SamplingDigests(digest(plan), hashlib.sha256(json.dumps(sampling, sort_keys=True).encode()).hexdigest())
