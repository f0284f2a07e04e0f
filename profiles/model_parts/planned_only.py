"""Models that can be planned and simulated but not run: the runtime lacks a feature on which no cost depends."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.profiles.experts import RUN_EXPERT_FAMILIES
from meshwright.profiles.model_shape import ModelSpec


def run_violations(spec: ModelSpec) -> Iterator[str]:
    """One sentence per reason why a model that can be planned cannot be run; none if it can."""
    if spec.experts and not spec.architecture.startswith(RUN_EXPERT_FAMILIES):
        yield (
            f"model {spec.name} has experts, which can be planned and simulated but not run in {spec.architecture}; "
            f"use {' or '.join(RUN_EXPERT_FAMILIES)}, or a dense model."
        )
    if spec.window:
        yield (
            f"model {spec.name} has sliding windows of {spec.window.num_tokens} tokens, which can be planned and "
            "simulated but not run; set sliding_window to null."
        )
    if spec.planned_rope:
        yield (
            f"model {spec.name} has rope type {spec.planned_rope!r}, which can be planned and simulated but not run; "
            "give a model whose rope_type is default or llama3."
        )
    if spec.experts and spec.experts.normalized and spec.experts.experts_per_token == 1:
        yield (
            f"model {spec.name} has one expert per token with normalised weights, so that its router would learn "
            "nothing: it can be planned and simulated but not run; give a model with two or more experts per token, or "
            "with norm_topk_prob=false."
        )
