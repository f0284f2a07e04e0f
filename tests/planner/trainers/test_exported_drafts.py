"""Drafts in an export: the keys of n-gram speculation, and a clause where a trainer has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.planner.plan.plan import Plan
from meshwright.planner.trainers.exporter import export
from meshwright.planner.trainers.registry import TRAINERS
from meshwright.profiles.frameworks import SGLANG, EngineName
from meshwright.profiles.speculation import Speculation
from meshwright.profiles.stages import GENERATE
from tests.planner.trainers.plans import best
from tests.planner.trainers.test_exported import no_model

NEMO = "policy.generation.vllm_kwargs.speculative_config"
VERL = "+actor_rollout_ref.rollout.engine_kwargs"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 8, "prompt_lookup_min": 2}


def drafting(name: str, engine: EngineName | None = None) -> Plan:
    """A plan that the trainer can express, with drafts of four tokens."""
    plan = best(name).plan
    speculation = Speculation(acceptance=(0.6,) * 4)
    workload = plan.facts.workload.model_copy(update={"speculation": speculation})
    facts = plan.facts.model_copy(update={"workload": workload, "engine": engine or plan.facts.engine})
    generation = plan.placement(GENERATE)
    drafted = generation.model_copy(update={"schedule": replace(generation.schedule, draft_tokens=4)})
    placements = tuple(drafted if one.stage == GENERATE else one for one in plan.placements)
    return plan.model_copy(update={"facts": facts, "placements": placements})


def written(name: str, plan: Plan) -> dict[str, Any]:
    found = export(TRAINERS[name], plan, no_model)
    assert found is not None
    assert found.inexpressible == ()
    return {one.key: one.value for one in found.settings if "specul" in one.key and "mtp" not in one.key}


def test_a_plan_without_drafts_names_no_key_of_them() -> None:
    for name in ("nemo-rl", "verl", "slime"):
        assert written(name, best(name).plan) == {}


@pytest.mark.parametrize(
    ("name", "engine", "keys"),
    [
        ("nemo-rl", None, {f"{NEMO}.{key}": value for key, value in NGRAM.items()}),
        ("verl", None, {f"{VERL}.vllm.speculative_config.{key}": value for key, value in NGRAM.items()}),
        (
            "verl",
            SGLANG,
            {f"{VERL}.sglang.speculative_algorithm": "NGRAM", f"{VERL}.sglang.speculative_num_draft_tokens": 5},
        ),
        ("slime", None, {"sglang-speculative-algorithm": "NGRAM", "sglang-speculative-num-draft-tokens": 5}),
    ],
)
def test_drafts_are_written_as_n_gram_speculation(name: str, engine: EngineName | None, keys: dict[str, Any]) -> None:
    assert written(name, drafting(name, engine)) == keys
    known = TRAINERS[name].keys
    assert all(known.knows(key) for key in keys)


def test_a_trainer_without_such_keys_is_said_to_require_none() -> None:
    (mode,) = (
        one
        for one in TRAINERS["openrlhf"].modes_for(best("openrlhf").plan.facts)
        if not any(one.inexpressible(best("openrlhf").plan))
    )
    assert f"{GENERATE} has draft_tokens=4, and the trainer requires 0" in mode.inexpressible(drafting("openrlhf"))
