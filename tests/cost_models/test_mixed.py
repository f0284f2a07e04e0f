"""On nodes of several kinds each part answers for itself, and what passes between them takes the slower way."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.cost_models.blended import cost_model
from meshwright.cost_models.mixed import homogeneous_cluster
from meshwright.cost_models.protocol import CostModel, RefitQuery, StageQuery
from meshwright.profiles.hardware import Cluster, Link, MixedCluster, device_named
from meshwright.profiles.layout import Layout
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.workload import Workload

SLOW, FAST = Link(seconds=1e-3, bytes_per_second=1e9), Link(seconds=0.0, bytes_per_second=1e15)


@pytest.fixture
def parts(a100s: Callable[[int], Cluster]) -> tuple[Cluster, Cluster]:
    first = a100s(2)
    device, intra_node, _ = device_named("h100-sxm")
    return first, first.model_copy(update={"device": device, "intra_node": intra_node})


def mixed(parts: tuple[Cluster, ...], between: Link, workload: Workload) -> CostModel:
    return cost_model(MixedCluster(parts=parts, between=between), workload, "bf16")


def move(model: ModelSpec, source_part: int, target_part: int) -> RefitQuery:
    layout = Layout(tp=2, dp=2)
    parts = {"source_part": source_part, "target_part": target_part}
    return RefitQuery(model=model, source=layout, target=Layout(tp=4), overlap=0, **parts)


@pytest.mark.parametrize("stage", ["actor_train", "ref_logprob", "actor_generate"])
def test_a_stage_costs_what_it_costs_on_its_part_alone(
    parts: tuple[Cluster, Cluster], query: Callable[..., StageQuery], fixed: Workload, stage: str
) -> None:
    model, question = mixed(parts, SLOW, fixed), query(stage, "tp2,dp4", 4, slots=16)
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
        assert slow.refit_seconds(within) == fast.refit_seconds(within)
        assert slow.refit_seconds(within) == cost_model(part, fixed, "bf16").refit_seconds(within)
    across = move(llama, 0, 1)
    assert slow.refit_seconds(across).total > fast.refit_seconds(across).total
    assert fast.refit_seconds(across).total >= fast.refit_seconds(move(llama, 1, 1)).total


def test_experience_is_handed_over_as_slowly_as_it_may_have_to_be(
    parts: tuple[Cluster, Cluster], fixed: Workload
) -> None:
    within = max(cost_model(part, fixed, "bf16").transfer_seconds(1e9).total for part in parts)
    assert mixed(parts, FAST, fixed).transfer_seconds(1e9).total == within
    assert mixed(parts, SLOW, fixed).transfer_seconds(1e9).total > 1.0 > within


BOTH = 2
"""The number of the two parts together."""

TRAINED = "gradient reduction", "optimizer", "parameter gather"


LONG = Workload(batch_size=64, prompt=LengthSpec(max=1000, fixed=1000), response=LengthSpec(max=1000, fixed=1000))
"""64 sequences that are long enough for arithmetic to decide how long they take."""


@pytest.mark.parametrize(
    ("stage", "layout", "recompute"),
    [("ref_logprob", "tp2,dp16", "none"), ("actor_train", "tp4,dp8,sp", "none"), ("actor_train", "tp4,dp8,sp", "full")],
)
def test_no_other_deal_of_rows_ends_sooner(
    parts: tuple[Cluster, Cluster], query: Callable[..., StageQuery], stage: str, layout: str, recompute: str
) -> None:
    model = mixed(parts, parts[0].inter_node, LONG)
    question = replace(query(stage, layout, 1, recompute), part=BOTH)
    each = question.layout.dp // 2

    def seconds(rows: tuple[int, ...]) -> float:
        return model.seconds(replace(question, schedule=replace(question.schedule, rows=rows))).total

    found = model.with_row_split(question).rows
    assert sum(found) == 64
    assert found[1] > found[0]  # the second part computes faster
    assert seconds(found) == min(seconds((mine, 64 - mine)) for mine in range(each, 64 - each + 1))


def test_two_kinds_take_the_passes_of_the_last_and_the_slower_of_every_exchange(
    parts: tuple[Cluster, Cluster], query: Callable[..., StageQuery], fixed: Workload
) -> None:
    model = mixed(parts, SLOW, fixed)
    cost = model.seconds(replace(query("actor_train", "tp2,dp16", 1, rows=(48, 16)), part=BOTH))
    kinds = [
        cost_model(homogeneous_cluster(one, other, SLOW), fixed, "bf16").seconds(
            replace(query("actor_train", "tp2,dp16", 1), replica_rows=rows)
        )
        for one, other, rows in ((*parts, 6), (*reversed(parts), 2))
    ]
    layers = [one.amount("layers", "embedding and head") for one in kinds]
    assert layers[0] > 2 * layers[1]
    assert cost.amount("layers", "embedding and head") == layers[0]
    for name in TRAINED:
        assert cost.amount(name) == max(one.amount(name) for one in kinds) > 0
    within = cost_model(parts[0], fixed, "bf16").seconds(query("actor_train", "tp2,dp8", 1))
    assert cost.amount("gradient reduction") > 10 * within.amount("gradient reduction")  # over the slow fabric


def test_rows_that_are_dealt_change_no_memory(
    parts: tuple[Cluster, Cluster], query: Callable[..., StageQuery], fixed: Workload
) -> None:
    """A rank keeps a micro-batch at a time, so that what is proven for one kind holds for the other."""
    model = mixed(parts, SLOW, fixed)
    for stage in ("actor_train", "ref_logprob"):
        each = [replace(query(stage, "tp2,dp16", 2, rows=rows), part=BOTH) for rows in ((8, 56), (32, 32))]
        assert model.memory(each[0]) == model.memory(each[1])
        assert model.memory(each[0]) == cost_model(parts[0], fixed, "bf16").memory(query(stage, "tp2,dp16", 2))


def test_no_choice_on_two_kinds_is_below_the_least(
    parts: tuple[Cluster, Cluster], query: Callable[..., StageQuery], fixed: Workload
) -> None:
    model = mixed(parts, FAST, fixed)
    question = replace(query("actor_train", "dp32", 2), part=BOTH)
    dealt = replace(question, schedule=model.with_row_split(question))
    least = model.lower_bound_seconds(question.stage, question.model, 32, BOTH)
    alone = [model.lower_bound_seconds(question.stage, question.model, 16, part) for part in range(2)]
    assert 0 < least < min(alone)
    assert model.seconds(dealt).total >= least


def test_weights_of_two_kinds_go_over_the_fabric(
    parts: tuple[Cluster, Cluster], llama: ModelSpec, fixed: Workload
) -> None:
    model = mixed(parts, SLOW, fixed)
    assert model.refit_seconds(move(llama, BOTH, 0)).total > model.refit_seconds(move(llama, 0, 0)).total
    assert model.refit_seconds(move(llama, BOTH, BOTH)) == model.refit_seconds(move(llama, 0, 1))
