"""On nodes of several kinds each part answers for itself, and what passes between them takes the slower way."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.cost_models.blended import BlendedModel, cost_model
from meshwright.cost_models.mixed import MixedModel
from meshwright.cost_models.question import Call, CostModel, Move
from meshwright.profiles.cluster import Cluster, Link, MixedCluster
from meshwright.profiles.devices import device_named
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.table import Table
from meshwright.profiles.workload import Workload

SLOW, FAST = Link(seconds=1e-3, bytes_per_second=1e9), Link(seconds=0.0, bytes_per_second=1e15)


@pytest.fixture
def parts(a100s: Callable[[int], Cluster]) -> tuple[Cluster, Cluster]:
    first = a100s(2)
    device, intra_node, _ = device_named("h100-sxm")
    return first, first.model_copy(update={"device": device, "intra_node": intra_node})


def mixed(parts: tuple[Cluster, ...], between: Link, workload: Workload) -> CostModel:
    return cost_model(MixedCluster(parts=parts, between=between), workload, "bf16")


def move(model: ModelSpec, source_part: int, target_part: int) -> Move:
    layout = Layout(tp=2, dp=2)
    parts = {"source_part": source_part, "target_part": target_part}
    return Move(model=model, source=layout, target=Layout(tp=4), overlap=0, **parts)


@pytest.mark.parametrize("stage", ["actor_train", "ref_logprob", "actor_generate"])
def test_a_stage_costs_what_it_costs_on_its_part_alone(
    parts: tuple[Cluster, Cluster], call: Callable[..., Call], fixed: Workload, stage: str
) -> None:
    model, question = mixed(parts, SLOW, fixed), call(stage, "tp2,dp4", 4, slots=16)
    for index, part in enumerate(parts):
        alone, here = cost_model(part, fixed, "bf16"), replace(question, part=index)
        assert model.seconds(here) == alone.seconds(question)
        assert model.memory(here) == alone.memory(question)
        assert model.tail_seconds(here) == alone.tail_seconds(question)
    assert model.seconds(replace(question, part=1)).total < model.seconds(question).total


def test_weights_stay_within_a_part_or_go_over_the_fabric(
    parts: tuple[Cluster, Cluster], llama: ModelSpec, fixed: Workload
) -> None:
    slow, fast = (mixed(parts, between, fixed) for between in (SLOW, FAST))
    for index, part in enumerate(parts):
        within = move(llama, index, index)
        assert slow.move_seconds(within) == fast.move_seconds(within)
        assert slow.move_seconds(within) == cost_model(part, fixed, "bf16").move_seconds(within)
    across = move(llama, 0, 1)
    assert slow.move_seconds(across).total > fast.move_seconds(across).total
    assert fast.move_seconds(across).total >= fast.move_seconds(move(llama, 1, 1)).total


def test_experience_is_handed_over_as_slowly_as_it_may_have_to_be(
    parts: tuple[Cluster, Cluster], fixed: Workload
) -> None:
    within = max(cost_model(part, fixed, "bf16").handover_seconds(1e9).total for part in parts)
    assert mixed(parts, FAST, fixed).handover_seconds(1e9).total == within
    assert mixed(parts, SLOW, fixed).handover_seconds(1e9).total > 1.0 > within


def test_more_slots_never_take_less_memory_only_where_no_part_was_measured(
    parts: tuple[Cluster, Cluster], table: Table, fixed: Workload
) -> None:
    cluster = MixedCluster(parts=parts, between=SLOW)
    analytic = [cost_model(part, fixed, "bf16") for part in parts]
    assert MixedModel(cluster, analytic, "bf16").memory_grows
    measured = BlendedModel(table, parts[0], fixed, "bf16")
    assert not MixedModel(cluster, [measured, analytic[1]], "bf16").memory_grows
