"""Experts that are whole and spread over tensor-parallel ranks, beside the same ones cut on as many replicas."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.communication import ALL_TO_ALL, Group, Network, groups_of
from meshwright.cost_models.cost import Cost
from meshwright.cost_models.kernels import Kernels, Mixture
from meshwright.cost_models.protocol import RefitQuery, StageQuery
from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.experts import Experts, routing
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.workload import Workload

NUM_EXPERTS, PICKED = 8, 2
EXCHANGE, TENSOR = "expert-parallel collectives", "tensor-parallel collectives"


@pytest.fixture
def mixture(llama: ModelSpec) -> ModelSpec:
    """Llama-2 7B with 8 experts of a quarter of its MLP's width in every layer."""
    experts = Experts(num_experts=NUM_EXPERTS, experts_per_token=PICKED, ffn_size=llama.ffn_size // 4)
    return replace(llama, experts=experts)


@pytest.fixture
def model(a100s: Callable[[int], Cluster], fixed: Workload) -> AnalyticModel:
    return AnalyticModel(a100s(2), fixed, "bf16")


@pytest.fixture
def network(a100s: Callable[[int], Cluster]) -> Network:
    return Network(a100s(2), efficiency_of("cuda", "a100-80gb"))


def amount(cost: Cost, name: str) -> float:
    return sum(term.amount for term in cost.terms if term.name == name)


def test_copies_are_exchanged_by_all_ranks_or_without_sequence_parallelism_by_columns(
    a100s: Callable[[int], Cluster],
) -> None:
    divided = groups_of(Layout(tp=2, dp=16, ep=8, etp=1, sp=True), a100s(4))
    alike = groups_of(Layout(tp=2, dp=16, ep=8, etp=1), a100s(4))
    assert (divided.experts, divided.expert_data) == (Group(8, 8), Group(4, 1))
    assert (alike.experts, alike.expert_data) == (Group(4, 4), Group(4, 1))


@pytest.mark.parametrize(("whole", "cut"), [("tp2,dp8,ep8,etp1,sp", "tp2,dp8,ep4,sp"), ("tp4,ep4,etp1,sp", "tp4,sp")])
def test_a_rank_holds_as_much_of_whole_experts_as_of_cut_ones(
    model: AnalyticModel, query: Callable[..., StageQuery], mixture: ModelSpec, whole: str, cut: str
) -> None:
    one, other = (model.memory(query("actor_train", layout, model=mixture)) for layout in (whole, cut))
    assert one.resident.terms == other.resident.terms


def test_what_a_token_leaves_on_the_rank_of_its_expert_it_leaves_on_no_other(
    model: AnalyticModel, query: Callable[..., StageQuery], mixture: ModelSpec, fixed: Workload
) -> None:
    whole, cut = (
        model.memory(query("actor_train", layout, model=mixture)).transient.terms[0].amount
        for layout in ("tp8,ep8,etp1,sp", "tp8,sp")
    )
    assert mixture.experts is not None
    busiest = routing().imbalance(fixed.max_tokens, PICKED, NUM_EXPERTS, 8)
    copied, inner = PICKED * 2 * mixture.hidden_size, PICKED * 4 * mixture.experts.ffn_size
    others = 4 * mixture.hidden_size + mixture.attention_elements
    assert whole / cut == pytest.approx((others + busiest * (copied + inner)) / (others + 8 * copied + inner), rel=0.01)


def test_whole_experts_make_the_products_of_as_many_ranks_that_bring_a_part_each(
    a100s: Callable[[int], Cluster],
) -> None:
    device, efficiency = a100s(1).device, efficiency_of("cuda", "a100-80gb")
    kernels = Kernels(device, efficiency, flops_per_second=device.flops_per_second["bf16"], weight_bytes=2, size=2)
    experts = Experts(num_experts=128, experts_per_token=8, ffn_size=384)
    folded = Mixture(kernels, experts, 4096, spread=2, folded=4, size=2)
    wide = Mixture(kernels, replace(experts, ffn_size=4 * 384), 4096, spread=8, size=2)
    for trains in (False, True):
        assert folded.seconds(4096, trains=trains) == pytest.approx(wide.seconds(1024, trains=trains))


@pytest.mark.parametrize(("stage", "exchanges"), [("ref_logprob", 2), ("actor_train", 4)])
def test_under_sequence_parallelism_each_rank_sends_its_part_and_nothing_is_gathered_around_experts(
    *,
    model: AnalyticModel,
    query: Callable[..., StageQuery],
    mixture: ModelSpec,
    network: Network,
    stage: str,
    exchanges: int,
) -> None:
    """64 rows of 128 tokens on 4 replicas of 2 ranks, in micro-batches of 2, through 32 layers."""
    whole, cut = (
        model.seconds(query(stage, layout, 2, model=mixture)) for layout in ("tp2,dp4,ep8,etp1,sp", "tp2,dp4,ep4,sp")
    )
    busiest = routing().imbalance(4 * 2 * 128, PICKED, NUM_EXPERTS, 8)
    once, _ = network.seconds(ALL_TO_ALL, Group(8, 8), busiest * 128 * PICKED * mixture.hidden_size * 2)
    assert amount(whole, EXCHANGE) == pytest.approx(8 * 32 * exchanges * once)
    at_ends = amount(model.seconds(query(stage, "tp2,dp4,sp", 2, model=replace(mixture, num_layers=1))), TENSOR)
    in_layers = amount(model.seconds(query(stage, "tp2,dp4,sp", 2, model=replace(mixture, num_layers=2))), TENSOR)
    a_layer = in_layers - at_ends
    assert amount(cut, TENSOR) - amount(whole, TENSOR) == pytest.approx(32 * a_layer / 2)


def test_a_shared_expert_is_cut_and_gathered_around_beside_whole_ones(
    model: AnalyticModel, query: Callable[..., StageQuery], mixture: ModelSpec
) -> None:
    assert mixture.experts is not None
    shared = replace(mixture, experts=replace(mixture.experts, shared_ffn_size=512))
    whole, cut = (
        amount(model.seconds(query("actor_train", layout, model=shared)), TENSOR)
        for layout in ("tp2,dp4,ep8,etp1,sp", "tp2,dp4,ep4,sp")
    )
    assert whole == cut


@pytest.mark.parametrize("stage", ["ref_logprob", "actor_generate"])
def test_ranks_with_the_same_tokens_send_those_of_their_column(
    model: AnalyticModel, query: Callable[..., StageQuery], mixture: ModelSpec, stage: str
) -> None:
    def exchanged(layout: str) -> float:
        return amount(model.seconds(query(stage, layout, model=mixture, slots=4)), EXCHANGE)

    assert 0 < exchanged("tp2,dp4,ep8,etp1") < exchanged("tp2,dp4,ep4")
    assert exchanged("tp8,ep8,etp1") == exchanged("tp8") == 0


def test_a_refit_to_whole_experts_brings_as_many_bytes(model: AnalyticModel, mixture: ModelSpec) -> None:
    def moved(source: Layout, target: Layout) -> float:
        return amount(
            model.refit_seconds(RefitQuery(model=mixture, source=source, target=target, overlap=0)), "weight bytes"
        )

    whole, cut = Layout(tp=2, dp=4, ep=8, etp=1), Layout(tp=2, dp=4, ep=4)
    assert moved(Layout(dp=8), whole) == moved(Layout(dp=8), cut)
    assert moved(cut, whole) == moved(whole, cut)


def test_an_update_reduces_whole_experts_over_those_who_hold_them(
    model: AnalyticModel, query: Callable[..., StageQuery], mixture: ModelSpec
) -> None:
    whole, cut = (
        model.seconds(query("actor_train", layout, model=mixture))
        for layout in ("tp2,dp8,ep4,etp1,sp", "tp2,dp8,ep2,sp")
    )
    for name in ("gradient reduction", "optimizer", "parameter gather"):
        assert amount(whole, name) == amount(cut, name) > 0
