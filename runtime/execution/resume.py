"""Checkpoints of a run on disk, and resuming from the newest one.

The last few are kept, and the one whose policy scored best on held-out prompts.

Prompts, random numbers and minibatches follow from the seed and the step. A checkpoint holds the trainers, the step
and, before the end of a run, the in-flight state of each rank.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from meshwright.planner.plan.job import Job
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.documents import write_atomically
from meshwright.profiles.errors import BadInput
from meshwright.runtime.execution.resume_rules import sampling_digests
from meshwright.runtime.generation.carrying import Resumed, resume_under_new_plan
from meshwright.runtime.generation.in_flight_state import (
    InFlightState,
    SamplingDigests,
    pack_in_flight_state,
    read_all_in_flight_states,
    read_in_flight_state,
    write_in_flight_state,
)
from meshwright.runtime.records.record import EvaluationRecord, evaluations
from meshwright.runtime.training.bodies import Trainer
from meshwright.runtime.training.checkpoint import load_trainers
from meshwright.runtime.training.copies import WeightCopy
from meshwright.runtime.training.manifest import MANIFEST, find_damage
from meshwright.runtime.training.saving import Saver, take_snapshot

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
    marks = [out / f"mark-{uuid.uuid4().hex}"]
    if dist.get_rank() == 0:
        marks[0].touch()
    dist.broadcast_object_list(marks)
    seen = [False] * dist.get_world_size()
    dist.all_gather_object(seen, (out / marks[0].name).exists())
    if dist.get_rank() == 0:
        marks[0].unlink()
    if not all(seen):
        ranks = ", ".join(str(rank) for rank, sees in enumerate(seen) if not sees)
        raise BadInput(f"--out {out} is not the same directory on ranks {ranks}; name one on a shared file system.")


def save_step(
    saver: Saver, out: Path, step: int, copies: Mapping[str, WeightCopy], in_flight: InFlightState, *, keep: int
) -> None:
    """Start saving the trainers and the in-flight state after `step` updates.

    Once they are on disk, checkpoints other than the last `keep` and the best are removed. Collective over the world.
    """
    rank, content, scored = dist.get_rank(), pack_in_flight_state(in_flight), evaluations(out)

    def publish_and_prune() -> None:
        write_atomically(out / LATEST, f"{checkpoint_of(out, step).relative_to(out)}\n")
        saved = saved_steps(out)
        for old in _steps_to_remove(saved, best_step(saved, scored), keep):
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


def best_step(saved: Collection[int], known: Iterable[EvaluationRecord]) -> int | None:
    """Return the saved step whose policy scored best on held-out prompts, the earliest of equals.

    None if no saved step was evaluated.
    """
    scored = [one for one in known if one.step in saved]
    return max(scored, key=lambda one: one.mean_score).step if scored else None


@dataclass(frozen=True, kw_only=True)
class LoadedState:
    """The state that a run continues from."""

    step: int = 0
    in_flight: InFlightState | None = None
    """This rank's in-flight state, if plan and sampling settings are unchanged."""
    migrated: Resumed = field(default_factory=Resumed)
    """The prompts and partial responses kept under another plan."""
    notes: tuple[str, ...] = ()
    """Notes on newer, damaged checkpoints and on the in-flight state."""


@dataclass(frozen=True, kw_only=True)
class ResumePolicy:
    """The plan and job of a resumed run, by which in-flight state is restored.

    With `draws_again` all responses in flight are sampled again.
    """

    plan: Plan
    job: Job
    resample: bool

    @property
    def sampling_digests(self) -> SamplingDigests:
        """Digests of the plan and the sampling settings of this run."""
        return sampling_digests(self.plan, self.job)

    def restore(self, directory: Path, done: int) -> tuple[InFlightState | None, Resumed]:
        """Return what is restored from a checkpoint: in-flight state under the same plan, else prompts and tokens.

        Collective over the world.
        """
        underway = None if self.resample else read_in_flight_state(directory, dist.get_rank(), self.sampling_digests)
        if underway is not None:
            num_dealt = underway.generation.num_wave_prompts if underway.generation else 0
            return underway, Resumed(reassigned=underway.reassigned, num_wave_prompts=num_dealt)
        carried = [self._migrated(directory, done) if dist.get_rank() == 0 else Resumed()]
        dist.broadcast_object_list(carried)
        return None, carried[0]

    def _migrated(self, directory: Path, done: int) -> Resumed:
        states = read_all_in_flight_states(directory)
        sampling, workload = self.sampling_digests.sampling, self.job.workload
        return resume_under_new_plan(
            states,
            self.plan,
            done,
            workload.batch_size,
            max_response=workload.max_response,
            resamples=self.resample or any(one.digests.sampling != sampling for one in states),
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
        underway, carried = policy.restore(path, step)
        return LoadedState(step=step, in_flight=underway, migrated=carried, notes=(*notes, *carried.notes))
    raise BadInput(f"{'; '.join(notes)}; no other checkpoint is left: start a new run in another --out.")


def checkpoint_of(out: Path, step: int) -> Path:
    """Return the directory of a run's checkpoint of a step."""
    return out / "checkpoints" / f"step-{step:06d}"


def _trainers(copies: Mapping[str, WeightCopy]) -> dict[str, Trainer]:
    return {name: copy.trainer for name, copy in copies.items() if copy.trainer is not None}
