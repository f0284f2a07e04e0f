"""SkyRL's own rules hold in what is written for it (skyrl/train/utils/utils.py of its package)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from meshwright.planner.plan.pins import parse_pins
from meshwright.planner.plan.plan import Plan
from meshwright.planner.solver.result import Limits
from meshwright.planner.trainers.exporter import best_expressible_plan
from meshwright.planner.trainers.registry import TRAINERS
from meshwright.planner.trainers.skyrl import deployment_modes
from meshwright.planner.trainers.trainer import ConfigValue
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Recompute, Schedule
from tests.planner.drawn import model_of
from tests.planner.trainers.configurations import configuration, plan_ahead
from tests.planner.trainers.plans import best, facts_for

MODEL, ENGINE = "trainer.policy.megatron_config", "generator.inference_engine"


@pytest.fixture(params=["colocated", "ahead"])
def plan(request: pytest.FixtureRequest) -> Plan:
    return best("skyrl").plan if request.param == "colocated" else plan_ahead("skyrl")


def number(found: dict[str, ConfigValue], key: str) -> int:
    value = found[key]
    assert isinstance(value, int)
    return value


def test_engines_have_all_ranks_of_generation_and_a_mini_batch_is_whole_micro_batches(plan: Plan) -> None:
    found = configuration("skyrl", plan)
    ranks = plan.placement("actor_generate").layout.num_ranks
    degrees = ("num_engines", "tensor_parallel_size", "pipeline_parallel_size")
    assert math.prod(number(found, f"{ENGINE}.{key}") for key in degrees) == ranks
    assert found["trainer.placement.colocate_all"] is (ranks == plan.facts.cluster.num_ranks)
    prompts, samples = (
        number(found, key) for key in ("trainer.policy_mini_batch_size", "generator.n_samples_per_prompt")
    )
    replicas = plan.placement("actor_train").layout.dp
    rows = number(found, "trainer.micro_train_batch_size_per_gpu")
    assert prompts * samples % replicas == 0 == prompts * samples // replicas % rows
    assert number(found, "trainer.train_batch_size") % prompts == 0


def test_a_reference_on_the_ranks_of_the_policy_has_as_many(plan: Plan) -> None:
    found = configuration("skyrl", plan)
    shares = plan.choice("ref_logprob", "pool") == plan.choice("actor_train", "pool")
    assert found["trainer.placement.colocate_policy_ref"] is shares
    names = ("num_nodes", "num_gpus_per_node")
    ref, policy = ([found[f"trainer.placement.{model}_{name}"] for name in names] for model in ("ref", "policy"))
    assert ref == policy or not shares


def test_what_shares_ranks_is_offloaded_and_a_reference_on_its_own_is_not() -> None:
    facts = facts_for("skyrl", staleness=1)
    modes = list(deployment_modes(facts))
    own = [mode for mode in modes if "the reference on" in mode.name]
    shared = [mode for mode in modes if mode not in own]
    assert own
    assert all({"ref_logprob.offload=none", "actor_train.offload=none"} <= set(mode.pins) for mode in own)
    assert all({"ref_logprob.offload=weights", "actor_train.offload=optimizer"} <= set(mode.pins) for mode in shared)


def test_tensor_parallelism_comes_with_sequence_parallelism() -> None:
    plan = best("skyrl").plan
    layout = Layout(tp=2, dp=2)
    placements = tuple(
        placement.model_copy(update={"layout": layout}) if placement.stage == "actor_train" else placement
        for placement in plan.placements
    )
    clauses = list(best("skyrl").mode.inexpressible(plan.model_copy(update={"placements": placements})))
    assert any("actor_train has layout=tp2,pp1,dp2, and the trainer requires sp with tp above 1" in c for c in clauses)
    assert best("skyrl").mode.expressible_value("actor_train", layout) == replace(layout, sp=True)


def test_a_layout_of_the_search_gets_the_sequence_parallelism_that_the_trainer_has() -> None:
    facts = facts_for("skyrl")
    pins = parse_pins(("actor_train.tp=2", "ref_logprob.tp=2"), facts.graph)
    found = best_expressible_plan(TRAINERS["skyrl"], facts, model_of(facts), pins=pins, limits=Limits(gap=0.3))
    assert found is not None
    assert all(found.plan.placement(stage).layout.sp for stage in ("actor_train", "actor_logprob", "ref_logprob"))


def with_recompute(plan: Plan, recompute: Recompute) -> Plan:
    def changed(schedule: Schedule) -> Schedule:
        return replace(schedule, recompute=recompute)

    placements = tuple(
        one.model_copy(update={"schedule": changed(one.schedule)}) if one.stage == "actor_train" else one
        for one in plan.placements
    )
    return plan.model_copy(update={"placements": placements})


@pytest.mark.parametrize("recompute", Recompute)
def test_a_method_of_recomputation_goes_only_with_full(recompute: Recompute) -> None:
    found = configuration("skyrl", with_recompute(best("skyrl").plan, recompute))
    prefix = f"{MODEL}.transformer_config_kwargs"
    assert found["trainer.gradient_checkpointing"] is (recompute is not Recompute.NONE)
    assert found.get(f"{prefix}.recompute_granularity") == (None if recompute is Recompute.NONE else recompute.value)
    is_null = recompute is Recompute.SELECTIVE
    assert (f"{prefix}.recompute_method" in found, f"{prefix}.recompute_num_layers" in found) == (is_null, is_null)
