"""A configuration that was written for a plan has the plan's cost, and nothing better is overlooked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.planner.imports.costed import imported
from meshwright.planner.imports.readers import READERS
from meshwright.planner.imports.said import Said
from meshwright.planner.solver.result import Limits
from meshwright.profiles.algorithms import Algorithm
from tests.planner.drawn import model_of
from tests.planner.export.plans import NAMES, facts_of
from tests.planner.imports.written import plan_of, written
from tests.planner.jobs import small_facts

LIMITS = Limits(gap=0.3)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    ("name", "algorithm"),
    [*((name, "ppo") for name in NAMES), ("verl", "rloo"), ("openrlhf", "grpo"), ("slime", "grpo")],
)
def test_what_was_exported_costs_the_same_when_it_is_imported(
    tmp_path: Path, name: str, algorithm: Algorithm, staleness: int
) -> None:
    plan = plan_of(name, staleness, algorithm)
    reader = READERS[name]
    configured = reader.read(written(name, plan, tmp_path))
    assert configured.algorithm == algorithm
    found = imported(reader, configured, plan.facts, model_of, limits=Limits(gap=0.05))
    assert found.plan is not None
    assert found.plan.period_seconds == pytest.approx(plan.period_seconds, rel=0.01)
    assert found.within is not None
    assert found.best is not None
    assert found.best.period_seconds <= found.within.period_seconds * (1 + 1e-9)


def test_a_number_that_is_not_legal_is_read_as_a_smaller_one_and_what_cannot_be_is_left_free(tmp_path: Path) -> None:
    plan = plan_of("verl", 0)
    configured = READERS["verl"].read(written("verl", plan, tmp_path))
    said = [one for one in configured.said if not one.what.startswith("ref_logprob.")]
    said += [Said("ref_logprob.micro_batch_size", 3, ("a.b",)), Said("ref_logprob.layout", "tp3", ("c.d",))]
    found = imported(READERS["verl"], replace(configured, said=tuple(said)), facts_of(), model_of, limits=LIMITS)
    assert found.plan is not None
    assert found.plan.placement("ref_logprob").schedule.micro_batch_size == 2
    assert "a.b: ref_logprob.micro_batch_size=3 is read as 2" in found.notes
    assert any(note.startswith("c.d: pin 'ref_logprob.layout=tp3") and "left free" in note for note in found.notes)


def test_searches_end_when_their_time_is_over_and_what_was_not_found_is_said(tmp_path: Path) -> None:
    configured = READERS["verl"].read(written("verl", plan_of("verl", 0), tmp_path))
    found = imported(READERS["verl"], configured, facts_of(), model_of, search_seconds=1e-6)
    assert (found.plan, found.within, found.best) == (None, None, None)
    assert any(
        "not known what a step of the configuration takes: no plan was found in 1e-06 s" in n for n in found.notes
    )
    slower = imported(READERS["verl"], configured, facts_of(), model_of, limits=LIMITS, search_seconds=60.0)
    assert slower.plan == imported(READERS["verl"], configured, facts_of(), model_of, limits=LIMITS).plan


def test_a_cap_of_tokens_is_read_as_it_is_or_as_the_next_smaller_and_where_tokens_do_not_decide_as_rows(
    tmp_path: Path,
) -> None:
    plan = plan_of("verl", 0)
    configured = READERS["verl"].read(written("verl", plan, tmp_path))
    stages = ("reward_score", "ref_logprob", "actor_train")
    dropped = ("micro_batch_size", "micro_batch_tokens")
    said = [one for one in configured.said if one.what not in {f"{s}.{key}" for s in stages for key in dropped}]
    said += [Said(f"{s}.micro_batch_tokens", n, (s,)) for s, n in zip(stages, (500, 100, 10**6), strict=True)]
    found = imported(READERS["verl"], replace(configured, said=tuple(said)), facts_of(), model_of, limits=LIMITS)
    assert found.plan is not None
    longest = facts_of().workload.max_tokens
    assert found.plan.placement("reward_score").schedule.micro_batch_tokens == 500
    assert found.plan.placement("ref_logprob").schedule.micro_batch_tokens == longest
    assert f"ref_logprob: ref_logprob.micro_batch_tokens=100 is read as {longest}" in found.notes
    trained = found.plan.placement("actor_train")
    rows = facts_of().workload.batch_size // facts_of().workload.num_minibatches // trained.layout.dp
    assert longest <= trained.schedule.micro_batch_tokens <= rows * longest


def test_a_configuration_that_does_not_fit_says_what_binds(tmp_path: Path) -> None:
    plan = plan_of("openrlhf", 0)
    configured = READERS["openrlhf"].read(written("openrlhf", plan, tmp_path))
    told: list[str] = []
    found = imported(
        READERS["openrlhf"],
        configured,
        small_facts(memory_bytes=2**10, num_minibatches=2),
        model_of,
        limits=LIMITS,
        progress=lambda what, _done, _total: told.append(what),
    )
    assert (found.plan, found.within, found.best) == (None, None, None)
    assert any("fits into no memory as it is" in note for note in found.notes)
    assert "searching what openrlhf can say" in told


def test_grpo_is_costed_as_it_is_and_within_the_trainer(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "python3 train.py --advantage-estimator grpo --rollout-batch-size 4 --n-samples-per-prompt 4 --colocate "
        "--rollout-max-response-len 128 --rollout-max-prompt-len 64 --global-batch-size 8 "
        "--actor-num-gpus-per-node 4 --tensor-model-parallel-size 2\n"
    )
    facts = facts_of(algorithm="grpo")
    found = imported(READERS["slime"], READERS["slime"].read(path), facts, model_of, limits=LIMITS)
    assert found.plan is not None
    assert found.plan.placement("actor_train").layout.tp == 2
    assert found.within is not None
    assert found.best is not None
    assert found.best.period_seconds <= found.plan.period_seconds * (1 + 1e-9)
    assert any(one.what == "workload.group_size" for one in found.deciding)
    assert not any(one.what.startswith("grpo.") for one in found.deciding)
