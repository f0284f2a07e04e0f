"""Checkpoints of a run on disk, resuming from the newest one, and the rules for changing the job of a resumed run.

The last few checkpoints are kept, and the one whose policy scored best on held-out prompts. A checkpoint holds the
trainers, the step and, before the end of a run, the in-flight state of each rank; prompts, random numbers and
minibatches follow from the seed and the step. Every field of the job has a rule: a change takes effect or is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType

import torch.distributed as dist

from meshwright.planner.job.job import DEFAULT_SETTINGS, Job
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.documents import Difference, differences, digest, write_atomically
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import Role
from meshwright.runtime.inference.in_flight import (
    InFlightState,
    SamplingDigests,
    pack_in_flight_state,
    read_all_in_flight_states,
    read_in_flight_state,
    write_in_flight_state,
)
from meshwright.runtime.records.record import EvaluationRecord, evaluations
from meshwright.runtime.records.run_directory import RunFile
from meshwright.runtime.rollout.plan_change import Resumed, resume_under_new_plan
from meshwright.runtime.training.checkpoint import Saver, load_trainers, take_snapshot
from meshwright.runtime.training.checkpoint_integrity import MANIFEST, find_damage
from meshwright.runtime.training.trainer import Trainer
from meshwright.runtime.training.weight_copies import WeightCopy


class Effect(Enum):
    """The time at which a changed field of the job takes effect, if it does."""

    AT_ONCE = "from the first step that is resumed on"
    RESAMPLE = "at once; responses in flight are dropped and sampled again"
    IF_SAME_PROMPTS = "at once, as long as the encoded training prompts stay what they are"
    NONE = "it may not change"


@dataclass(frozen=True)
class Rule:
    """The effect of changing a field of the job between runs; `reason` says why if it may not change."""

    effect: Effect
    reason: str = ""


_AT_ONCE, _RESAMPLE, _SAME_PROMPTS = Rule(Effect.AT_ONCE), Rule(Effect.RESAMPLE), Rule(Effect.IF_SAME_PROMPTS)

_SETTING_RULES = {
    "actor_learning_rate": _AT_ONCE,
    "critic_learning_rate": _AT_ONCE,
    "actor_schedule": _AT_ONCE,
    "critic_schedule": _AT_ONCE,
    "critic_warmup_steps": _AT_ONCE,
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
    "teacher_top_k": _AT_ONCE,
    "divergence": _AT_ONCE,
    "distillation_weight": _AT_ONCE,
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
        **{f"models.{role}.path": _AT_ONCE for role in Role},  # the plan is held to its shapes and digests
        "cluster": _AT_ONCE,
        "precision": Rule(Effect.NONE, "the weights in the checkpoint have it"),
        "workload.batch_size": Rule(Effect.NONE, "it decides which prompts a step gets"),
        "workload.group_size": Rule(Effect.NONE, "it decides which prompts a step gets"),
        "workload.best_of": Rule(Effect.NONE, "it decides the sample ids of a step"),
        "workload.prompt": _SAME_PROMPTS,
        "workload.response": _AT_ONCE,
        "workload.images": _AT_ONCE,
        "workload.turns": _AT_ONCE,
        "workload.kept_tokens": _RESAMPLE,
        "workload.speculation": _AT_ONCE,
        "workload.dynamic_sampling": Rule(Effect.NONE, "which prompts come next follows from it"),
        "workload.dynamic_sampling.acceptance": _AT_ONCE,
        "workload.dynamic_sampling.histogram": _AT_ONCE,
        "workload.dynamic_sampling.num_prompts": _AT_ONCE,
        "workload.num_minibatches": _AT_ONCE,
        "workload.num_epochs": _AT_ONCE,
        "staleness": _AT_ONCE,
        "controllers": _AT_ONCE,
        "cache_after_refit": _AT_ONCE,
        "old_logprobs": _AT_ONCE,
        "engine": _AT_ONCE,
        "engines": _AT_ONCE,
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
        "evaluation": _AT_ONCE,
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
    # The algorithm comes first, because the settings of another algorithm may have no rule.
    for change in sorted(changed, key=lambda change: change.key != "algorithm"):
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
    """Return digests of the plan and of the settings that sampling depends on.

    Responses in flight are dropped if the latter change.
    """
    settings = job.settings.model_dump(mode="json")
    sampling = {key: settings[key] for key, rule in _SETTING_RULES.items() if rule.effect is Effect.RESAMPLE}
    if job.workload.kept_tokens:
        sampling["kept_tokens"] = job.workload.kept_tokens
    return SamplingDigests(digest(plan), hashlib.sha256(json.dumps(sampling, sort_keys=True).encode()).hexdigest())


LATEST = "latest"
"""The file in the directory of a run that names its newest checkpoint, for other programs."""

_STEP = re.compile(r"step-([0-9]+)")


def latest_step(out: Path) -> int | None:
    """Return the number of updates in the newest complete checkpoint of a run; None if there is no checkpoint."""
    return max(saved_steps(out), default=None)


def saved_steps(out: Path) -> list[int]:
    """Return the ascending steps of all complete checkpoints of a run."""
    matches = [(path, _STEP.fullmatch(path.name)) for path in (out / "checkpoints").glob("step-*")]
    return sorted(int(match[1]) for path, match in matches if match and (path / MANIFEST).exists())


def latest_checkpoint(out: Path) -> Path | None:
    """Return the directory of a run's newest complete checkpoint; None if there is none."""
    step = latest_step(out)
    return None if step is None else checkpoint_of(out, step)


def require_shared(out: Path) -> None:
    """Raises BadInput on every rank unless all ranks see the same directory. Collective over the world."""
    markers = [out / f"mark-{uuid.uuid4().hex}"]
    if dist.get_rank() == 0:
        markers[0].touch()
    dist.broadcast_object_list(markers)
    seen = [False] * dist.get_world_size()
    dist.all_gather_object(seen, (out / markers[0].name).exists())
    if dist.get_rank() == 0:
        markers[0].unlink()
    if not all(seen):
        ranks = ", ".join(str(rank) for rank, sees in enumerate(seen) if not sees)
        raise BadInput(f"--out {out} is not the same directory on ranks {ranks}; name one on a shared file system.")


def save_step(
    saver: Saver,
    out: Path,
    step: int,
    copies: Mapping[str, WeightCopy],
    in_flight: InFlightState,
    *,
    keep: int,
    prompt_sets: Mapping[str, str],
) -> None:
    """Start saving the trainers and the in-flight state after `step` updates.

    Once they are on disk, checkpoints other than the last `keep` and the best are removed. `prompt_sets` has the
    digests of the sets of held-out prompts, by name. Collective over the world.
    """
    rank, content, scored = dist.get_rank(), pack_in_flight_state(in_flight), evaluations(out)

    def publish_and_prune() -> None:
        write_atomically(out / LATEST, f"{checkpoint_of(out, step).relative_to(out)}\n")
        saved = saved_steps(out)
        for old in _steps_to_remove(saved, best_step(saved, scored, prompt_sets), keep):
            shutil.rmtree(checkpoint_of(out, old))

    saver.save(
        lambda: take_snapshot(
            checkpoint_of(out, step),
            _trainers(copies),
            lambda directory: write_in_flight_state(directory, rank, content),
        ),
        publish_and_prune,
    )


def _steps_to_remove(steps: Sequence[int], best: int | None, keep: int) -> list[int]:
    return [step for step in sorted(steps)[:-keep] if step != best]


def best_step(saved: Collection[int], known: Iterable[EvaluationRecord], prompt_sets: Mapping[str, str]) -> int | None:
    """Return the saved step whose policy scored best on the first set of held-out prompts, the earliest of equals.

    `prompt_sets` has the digests of the sets of the job as it is now, by name: scores on a set that was removed or
    changed do not count, unless the job has no set any more. None if no saved step was evaluated.
    """
    records = list(known)
    digests = {record.prompt_set: record.prompts for record in records}  # of the latest evaluation on each set
    first = next(iter((prompt_sets or digests).items()), None)
    scored = [record for record in records if record.step in saved and (record.prompt_set, record.prompts) == first]
    return max(scored, key=lambda record: record.mean_score).step if scored else None


@dataclass(frozen=True, kw_only=True)
class LoadedState:
    """The state that a run continues from."""

    step: int = 0
    in_flight: InFlightState | None = None
    """This rank's in-flight state, if plan and sampling settings are unchanged."""
    migrated: Resumed = field(default_factory=Resumed)
    """The prompts of a resumed run and, from a checkpoint of another plan, its partial responses."""
    notes: tuple[str, ...] = ()
    """Notes on newer, damaged checkpoints and on the in-flight state."""


@dataclass(frozen=True, kw_only=True)
class ResumePolicy:
    """The plan and job of a resumed run, which decide what in-flight state is restored.

    With `resample` all responses in flight are dropped and sampled again.
    """

    plan: Plan
    job: Job
    resample: bool

    @property
    def sampling_digests(self) -> SamplingDigests:
        """Digests of the plan and the sampling settings of this run."""
        return sampling_digests(self.plan, self.job)

    def restore(self, directory: Path, done: int) -> tuple[InFlightState | None, Resumed]:
        """Return this rank's in-flight state, None under another plan or with `resample`, and what is taken over.

        `done` is the number of updates in the checkpoint. Collective over the world.
        """
        in_flight_state = (
            None if self.resample else read_in_flight_state(directory, dist.get_rank(), self.sampling_digests)
        )
        if in_flight_state is not None:
            num_wave_prompts = in_flight_state.generation.num_wave_prompts if in_flight_state.generation else 0
            return in_flight_state, Resumed(reassigned=in_flight_state.reassigned, num_wave_prompts=num_wave_prompts)
        migrated = [self._migrated(directory, done) if dist.get_rank() == 0 else Resumed()]
        dist.broadcast_object_list(migrated)
        return None, migrated[0]

    def _migrated(self, directory: Path, done: int) -> Resumed:
        states = read_all_in_flight_states(directory)
        sampling, workload = self.sampling_digests.sampling, self.job.workload
        return resume_under_new_plan(
            states,
            self.plan,
            done,
            workload.batch_size,
            max_response=workload.max_response,
            resamples=self.resample or any(state.digests.sampling != sampling for state in states),
        )


def load_step(out: Path, copies: Mapping[str, WeightCopy], policy: ResumePolicy) -> LoadedState:
    """Load the trainers from the newest undamaged checkpoint; damaged ones are renamed.

    Collective over the world. Raises BadInput if all are damaged.
    """
    notes: list[str] = []
    for step in reversed(saved_steps(out)):
        path = checkpoint_of(out, step)
        if reason := find_damage(path):
            renamed = path.with_name(f"{path.name}.damaged")
            if dist.get_rank() == 0:
                shutil.rmtree(renamed, ignore_errors=True)
                path.rename(renamed)
            notes.append(f"checkpoint {path.name} is damaged and was put aside as {renamed.name}: {reason}")
            continue
        load_trainers(path, _trainers(copies))
        in_flight_state, migrated = policy.restore(path, step)
        return LoadedState(step=step, in_flight=in_flight_state, migrated=migrated, notes=(*notes, *migrated.notes))
    raise BadInput(f"{'; '.join(notes)}; no other checkpoint is left: start a new run in another --out.")


def checkpoint_of(out: Path, step: int) -> Path:
    """Return the directory of a run's checkpoint of a step."""
    return out / "checkpoints" / f"step-{step:06d}"


def _trainers(copies: Mapping[str, WeightCopy]) -> dict[str, Trainer]:
    return {name: copy.trainer for name, copy in copies.items() if copy.trainer is not None}
