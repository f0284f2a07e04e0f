"""A source of old log-probabilities is written under the key that a trainer has for it, read back, or refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from meshwright.planner.job.job import Facts
from meshwright.planner.plan.plan import Plan
from meshwright.planner.solver.result import Limits
from meshwright.planner.trainers.areal import read_areal
from meshwright.planner.trainers.exporter import best_expressible_plan, export
from meshwright.planner.trainers.nemo_rl import read_nemo_rl
from meshwright.planner.trainers.registry import TRAINERS
from meshwright.planner.trainers.slime import read_slime
from meshwright.planner.trainers.verl import read_verl
from meshwright.profiles.algorithms import Algorithm, OldLogprobs
from meshwright.profiles.errors import BadInput
from tests.planner.drawn import model_of
from tests.planner.trainers.configurations import configuration
from tests.planner.trainers.plans import NAMES, facts_for
from tests.planner.trainers.written import assert_is_read, written

READERS = {"verl": read_verl, "slime": read_slime, "areal": read_areal, "nemo-rl": read_nemo_rl}
KEYS: dict[tuple[str, OldLogprobs], dict[str, bool]] = {
    ("verl", "generator"): {
        "algorithm.rollout_correction.bypass_mode": True,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
    },
    ("slime", "generator"): {"use-rollout-logprobs": True, "use-tis": False},
    ("areal", "generator"): {"actor.recompute_logprob": False, "actor.use_decoupled_loss": False},
    ("nemo-rl", "training"): {"loss_fn.force_on_policy_ratio": True},
}


def facts_with(name: str, source: OldLogprobs) -> Facts:
    algorithm: Algorithm | None = "grpo" if source == "training" else None
    facts = facts_for(name, algorithm=algorithm)
    workload = facts.workload.model_copy(update={"num_minibatches": 1})
    return facts.model_copy(update={"old_logprobs": source, "workload": workload})


@cache
def best(name: str, source: OldLogprobs) -> Plan:
    facts = facts_with(name, source)
    found = best_expressible_plan(TRAINERS[name], facts, model_of(facts), limits=Limits(gap=0.3))
    assert found is not None
    return found.plan


@pytest.mark.parametrize(("name", "source"), KEYS)
def test_what_is_written_is_read_as_it_was(name: str, source: OldLogprobs, tmp_path: Path) -> None:
    plan = best(name, source)
    given = configuration(name, plan)
    assert {key: given[key] for key in KEYS[name, source]} == KEYS[name, source]
    found = READERS[name](written(name, plan, tmp_path))
    assert found.by_name["old_logprobs"] == source
    assert "actor_logprob" not in {one.what.partition(".")[0] for one in found.fields}
    assert_is_read(plan, found)


@pytest.mark.parametrize("name", READERS)
def test_a_job_that_recomputes_them_is_read_as_one(name: str, tmp_path: Path) -> None:
    plan = best(name, "recompute")
    assert "old_logprobs" not in READERS[name](written(name, plan, tmp_path)).by_name


@pytest.mark.parametrize(
    ("name", "source"),
    [(name, source) for name in NAMES for source in ("generator", "training") if (name, source) not in KEYS],
)
def test_a_source_without_a_key_is_refused_by_name(name: str, source: OldLogprobs) -> None:
    facts = facts_with(name, source)
    with pytest.raises(BadInput, match=f"^old_logprobs={source} is not written for {name}, which has no key for it"):
        TRAINERS[name].require_expressible(facts)


def test_one_budget_is_led_by_the_first_stage_that_is_left() -> None:
    """slime has one budget for all forward passes, which was led by the pass that is missing."""
    plan = best("slime", "generator")
    caps = {plan.placement(stage).schedule.micro_batch_size for stage in ("ref_logprob", "critic_value")}
    assert len(caps) == 1
    found = export(TRAINERS["slime"], plan, model_of)
    assert found is not None
    [origin] = [one.origin for one in found.settings if one.key == "log-probs-max-tokens-per-gpu"]
    assert origin.startswith("placements.ref_logprob")


def test_nemo_rl_computes_them_again_for_the_filter_that_compares_them(tmp_path: Path) -> None:
    path = written("nemo-rl", best("nemo-rl", "training"), tmp_path)
    found = read_nemo_rl(path, {"grpo.seq_logprob_error_threshold": 2.0})
    assert "old_logprobs" not in found.by_name
