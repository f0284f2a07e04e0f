"""Settings of published recipes that their tables do not show, from `recipes.yaml`."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Literal

from benchmarks.fidelity.rows import Row
from benchmarks.fidelity.shapes import shape_key
from meshwright.profiles.documents import Document, read_yaml
from meshwright.profiles.frameworks import Framework

_RELEASE = re.compile(r"\b(\d\d\.\d\d(?:\.\d\d)?) NeMo Container")


class Recipe(Document):
    """Settings of one or several recipes: which part of a step is a CUDA graph, how tokens reach their experts, and
    what is computed again.

    `merged` stands for DeepEP or HybridEP, `fused` for experts that are one kernel with their biases and activation,
    `capacity` for experts that all get the same number of tokens, while others are dropped; `recompute` `unsaved`
    repeats all but the projections to queries, keys and values. Rows of every model, GPU and release match where none
    is named.
    """

    trainer: str = "megatron-bridge"
    models: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    since: str = ""
    until: str = "99"
    eight_bit: bool = False
    graphs: Literal["none", "layers", "whole"] = "none"
    merged: bool = False
    overlapped: bool = False
    fused: bool = False
    capacity: bool = False
    recompute: Literal["none", "full", "unsaved"] = "none"
    ep: int | None = None

    def matches(self, trainer: str, model: str, gpu: str, release: str, *, is_eight_bit: bool) -> bool:
        """Whether a row of this trainer, model, GPU, release and number format was measured with it."""
        in_time = self.since <= release and release[: len(self.until)] <= self.until
        named = (not self.models or model in self.models) and (not self.gpus or gpu in self.gpus)
        return trainer == self.trainer and named and in_time and (is_eight_bit or not self.eight_bit)

    def applied_to(self, framework: Framework) -> Framework:
        """Return the framework with these settings."""
        return framework.model_copy(
            update={
                "cuda_graphs": self.graphs != "none",
                "records_experts": self.graphs == "whole",
                "merged_copies": self.merged,
                "overlapped_experts": self.overlapped,
                "fused_expert_biases": self.fused,
                "counts_on_host": framework.counts_on_host and not self.capacity,
            }
        )


class _Recipes(Document):
    recipes: tuple[Recipe, ...]
    sources: tuple[str, ...]


def recipe_of(row: Row, trainer: str, *, is_eight_bit: bool) -> Recipe | None:
    """Return the recipe of a row of a trainer's tables, None where its settings are not known."""
    release = _RELEASE.search(row.get("source", ""))
    model, gpu = shape_key(row["model"]), row["gpu"].removeprefix("DGX-")
    asked = (trainer, model, gpu, release[1] if release else "")
    return next((recipe for recipe in _recipes() if recipe.matches(*asked, is_eight_bit=is_eight_bit)), None)


@cache
def _recipes() -> tuple[Recipe, ...]:
    return read_yaml(_Recipes, Path(__file__).with_name("recipes.yaml"), "recipes").recipes
