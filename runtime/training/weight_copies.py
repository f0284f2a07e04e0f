"""The models on a rank: one copy of a role's weights for each pool and layout that its stages use.

The training stage's copy owns the weights and the optimizer; every other copy of a trained role is refit from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from meshwright.planner.job.job import Job
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import Role
from meshwright.runtime.model.adapters import init_adapter
from meshwright.runtime.model.fp8_linears import quantise_linears
from meshwright.runtime.model.kernel_choice import ChosenKernels
from meshwright.runtime.model.mesh import Mesh, build_mesh
from meshwright.runtime.model.model_shard import Decoder, ModelChunks, build_model, named_global_parameters
from meshwright.runtime.model.weights import load_constants, load_weights
from meshwright.runtime.training.refit import RefitCopy
from meshwright.runtime.training.replica_overlap import overlap_buckets
from meshwright.runtime.training.trainer import Trainer
from meshwright.runtime.training.versions import Version

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class WeightCopy:
    """One copy on this rank: `model` is None outside its mesh, `trainer` is None if the copy is not trained."""

    stage: str  # the stage that the copy is named after, Plan.copy_of
    spec: ModelSpec  # its vocabulary is that of the tokenizer
    is_trained: bool
    mesh: Mesh
    model: ModelChunks | None
    trainer: Trainer | None
    version: Version

    @property
    def decoder(self) -> Decoder:
        """The model of a copy, on a member of its mesh; only a trained copy may have interleaved chunks instead."""
        assert isinstance(self.model, Decoder), f"{self.stage} is {self.mesh.layout}"
        return self.model


def build_copies(
    plan: Plan, job: Job, directory: Path, num_tokens: int, kernels: ChosenKernels
) -> dict[str, WeightCopy]:
    """Builds every copy of the plan, by the stage it is named after, in the same order on every rank.

    Weights that a refit fills at the start of a step are not loaded: all weights of a copy, or only its adapter.
    A language model gives all probability to its first `num_tokens` tokens, in the generator and in the trainer alike,
    because models of one job may pad the tokenizer's vocabulary to different sizes.
    """
    names = {p.stage: plan.copy_of(p.stage) for p in plan.placements}
    refit_targets = {refit.target for refit in plan.refits}
    copies = {}
    for name in sorted(set(names.values())):
        placement, role = plan.placement(name), plan.stage(name).role
        stored_spec = plan.facts.models.spec(role)
        spec = stored_spec if stored_spec.scalar_head else sampling_spec(stored_spec, num_tokens)
        mesh = build_mesh(placement.layout, plan.pool_of(name).first_rank)
        model, trainer = None, None
        is_trained = plan.stage(name).trains
        if mesh.is_member:
            model = build_model(
                spec,
                mesh,
                dtype=DTYPES[plan.facts.precision],
                recompute=placement.schedule.recompute.value,
                trainable=is_trained,
                kernels=kernels,
            )
            if plan.stage(name).is_quantised:
                assert isinstance(model, Decoder), f"{name} is {mesh.layout}"
                quantise_linears(model)
            if name not in refit_targets or spec.adapter:
                load_weights(model, stored_spec, mesh, directory / job.models.source(role).path)
            else:
                load_constants(model, stored_spec, directory / job.models.source(role).path)
            if name not in refit_targets and spec.adapter:
                init_adapter(
                    dict(named_global_parameters(model)),
                    job.settings.seed,
                    tp=placement.layout.tp,
                    tp_rank=mesh.tp_rank,
                    etp=placement.layout.etp,
                )
            if is_trained:
                trainer = build_trainer(model, mesh, role, job, kernels)
        version = Version(name, None if name in refit_targets else 0)
        copies[name] = WeightCopy(
            stage=name, spec=spec, is_trained=is_trained, mesh=mesh, model=model, trainer=trainer, version=version
        )
    return copies


def sampling_spec(spec: ModelSpec, num_tokens: int) -> ModelSpec:
    """The model with all rows of its vocabulary after the first `num_tokens` treated as padding."""
    return replace(spec, vocab_size=num_tokens, vocab_multiple=spec.padded_vocab_size)


def build_refits(plan: Plan, copies: Mapping[str, WeightCopy]) -> dict[tuple[str, str], RefitCopy]:
    """Builds the plan's refits, by (source, target). Collective over the world."""
    refits = {}
    for number, refit in enumerate(plan.refits):
        source, target = copies[refit.source], copies[refit.target]
        refits[refit.source, refit.target] = RefitCopy(
            source.model,
            source.mesh,
            target.model,
            target.mesh,
            number=number,
            versions=(source.version, target.version),
        )
    return refits


def restore_versions(copies: Mapping[str, WeightCopy], step: int) -> None:
    """Sets the version of trained copies restored from a checkpoint after `step` steps; refits set the others."""
    for copy in copies.values():
        if copy.is_trained:
            copy.version.number = step


def build_trainer(model: ModelChunks, mesh: Mesh, role: Role, job: Job, kernels: ChosenKernels) -> Trainer:
    """A trainer with the job's optimizer settings for a role, at the learning rate of its first step."""
    return Trainer(
        model,
        mesh,
        learning_rate=job.settings.learning_rate(role, 0),
        weight_decay=job.settings.weight_decay,
        max_grad_norm=job.settings.max_grad_norm,
        betas=(job.settings.adam_beta1, job.settings.adam_beta2),
        epsilon=job.settings.adam_eps,
        buckets=overlap_buckets(model, mesh, kernels),
    )
