"""A plan is one text, and knows which stages share a copy and which wait for each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.planner.plan.plan import Plan, read_plan, write_plan
from meshwright.planner.plan.steps_ahead import steps_ahead_patterns
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.packing import ReplicaAssignment
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Role
from tests.planner.jobs import mixed_facts
from tests.planner.plans import random_plan
from tests.seeds import seeds


@seeds(2, all=6)
def test_reading_what_was_written_is_the_identity_and_writes_the_same_bytes(seed: int, tmp_path: Path) -> None:
    plan = random_plan(seed, ahead=steps_ahead_patterns(PPO_GRAPH, 2)[seed % 3])
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    write_plan(one, plan)
    assert read_plan(one) == plan
    write_plan(other, read_plan(one))
    assert other.read_bytes() == one.read_bytes()


@pytest.mark.parametrize("version", [1, 2, 4, "two", True])
def test_another_schema_version_is_refused_before_its_keys_are_read(version: object, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"schema_version": version, "what": "nobody knows"}))
    with pytest.raises(
        BadInput, match=f"schema_version={version!r} is not the 3 this program reads; plan the job again"
    ):
        read_plan(path)


def test_a_plan_of_more_ranks_than_are_planned_for_is_refused(tmp_path: Path) -> None:
    plan = random_plan(0)
    cluster = plan.facts.cluster.model_copy(update={"nodes": 10**7})
    many = plan.model_copy(update={"facts": plan.facts.model_copy(update={"cluster": cluster})})
    write_plan(tmp_path / "plan.json", many)
    with pytest.raises(BadInput, match=r"plan .*plan\.json"):
        read_plan(tmp_path / "plan.json")


@seeds(4, all=20)
def test_a_copy_is_of_the_role_on_the_same_ranks_and_the_trained_one_where_it_is_there(seed: int) -> None:
    plan = random_plan(seed)
    for placement in plan.placements:
        owner = plan.placement(plan.copy_of(placement.stage))
        assert (owner.pool, owner.layout) == (placement.pool, placement.layout)
        assert plan.stage(owner.stage).role == plan.stage(placement.stage).role
        assert plan.copy_of(owner.stage) == owner.stage
        trained = PPO_GRAPH.train_stage.get(plan.stage(placement.stage).role)
        if trained and _at(plan, trained) == _at(plan, placement.stage):
            assert owner.stage == trained


@pytest.mark.parametrize(
    ("pp", "schedule", "any_number"),
    [
        (1, Schedule(micro_batch_size=2), False),
        (1, Schedule(micro_batch_size=0, micro_batch_tokens=512), True),
        (2, Schedule(micro_batch_size=0, micro_batch_tokens=512), False),
    ],
)
def test_replicas_take_any_number_of_rows_where_tokens_bound_memory_for_all_of_them(
    pp: int, schedule: Schedule, any_number: bool
) -> None:
    plan = random_plan(0)
    placement = plan.placement("actor_train").model_copy(
        update={"layout": Layout(pp=pp, dp=4 // pp), "schedule": schedule}
    )
    others = tuple(one for one in plan.placements if one.stage != "actor_train")
    deal = plan.model_copy(update={"placements": (*others, placement)}).row_split_of("actor_train")
    assert deal == ReplicaAssignment(plan.facts.models.spec(Role.ACTOR), (4 // pp,), (), any_number)


def _at(plan: Plan, stage: str) -> tuple[object, ...]:
    placement = plan.placement(stage)
    return placement.pool, placement.layout


@pytest.mark.parametrize("ahead", steps_ahead_patterns(PPO_GRAPH, 2), ids=str)
def test_a_consumer_waits_for_what_is_written_in_its_own_turn(ahead: dict[str, int]) -> None:
    plan = random_plan(1, ahead=ahead)
    assert plan.ahead == ahead
    for edge in plan.edges:
        assert plan.reads_same_period(edge.producer, edge.consumer) == (ahead[edge.producer] == ahead[edge.consumer])


def test_a_stage_is_in_the_part_that_holds_its_ranks_or_on_two() -> None:
    plan = random_plan(2, mixed_facts(memory_bytes=(2**50, 2**50)))
    cluster = plan.facts.cluster
    for stage in PPO_GRAPH.by_name:
        parts = sorted({cluster.part_of(rank) for rank in plan.pool_of(stage).ranks})
        assert tuple(cluster.parts[part] for part in parts) == cluster.parts_of(plan.part_of(stage))
