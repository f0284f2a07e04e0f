"""Experts spread over replicas: what a rank holds and reads shrinks, and tokens travel to their experts and back."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.communication import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, Group, Network, groups_of
from meshwright.cost_models.compute import AnalyticShard
from meshwright.cost_models.cost import Cost
from meshwright.cost_models.kernels import Kernels, Mixture
from meshwright.cost_models.params import stage_parts
from meshwright.cost_models.protocol import RefitQuery, StageQuery
from meshwright.profiles.efficiency import Protocol, efficiency_of
from meshwright.profiles.experts import Experts, routing
from meshwright.profiles.frameworks import framework_named
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.table import TimedPass
from meshwright.profiles.workload import Workload

NUM_EXPERTS, PICKED = 8, 2
EXCHANGE = "expert-parallel collectives"


@pytest.fixture
def mixture(llama: ModelSpec) -> ModelSpec:
    """Llama-2 7B with 8 experts of a quarter of its MLP's width, in all layers but the first 8."""
    experts = Experts(
        num_experts=NUM_EXPERTS, experts_per_token=PICKED, ffn_size=llama.ffn_size // 4, num_dense_layers=8
    )
    return replace(llama, experts=experts)


@pytest.fixture
def ask(
    a100s: Callable[[int], Cluster], fixed: Workload, query: Callable[..., StageQuery], mixture: ModelSpec
) -> Callable[..., Cost]:
    model = AnalyticModel(a100s(2), fixed, "bf16")

    def seconds(stage: str, layout: str, *schedule: object, **changes: object) -> Cost:
        return model.seconds(query(stage, layout, *schedule, model=mixture, **changes))

    return seconds


def amount(cost: Cost, name: str) -> float:
    return sum(term.amount for term in cost.terms if term.name == name)


def test_groups_are_of_neighbouring_replicas_and_of_those_that_hold_the_same_experts(
    a100s: Callable[[int], Cluster],
) -> None:
    groups = groups_of(Layout(tp=2, dp=16, ep=4), a100s(4))
    assert (groups.experts, groups.expert_data) == (Group(4, 4), Group(4, 1))
    wide = groups_of(Layout(tp=4, pp=2, dp=8, ep=8), a100s(8))
    assert (wide.experts, wide.expert_data) == (Group(8, 2), Group(1, 1))


def test_an_all_to_all_keeps_one_part_and_sends_each_other_part_over_its_own_link(
    a100s: Callable[[int], Cluster],
) -> None:
    """16 ranks in 2 nodes: of 16 parts 7 stay in the node and 8 leave it, each rank over its own adapter."""
    cluster = a100s(2)
    protocol = Protocol(start_seconds=0.0, step=1.0, link_bytes=0.5, fabric_bytes=0.5)
    network = Network(cluster, efficiency_of("cuda").model_copy(update={"protocols": (protocol,), "multicast": None}))
    intra, inter = cluster.intra_node, cluster.inter_node
    across, _ = network.seconds(ALL_TO_ALL, Group(16, 8), 1e9)
    within, _ = network.seconds(ALL_TO_ALL, Group(8, 8), 1e9)
    assert across == pytest.approx(inter.seconds + 7 * intra.seconds + 8 / 16 * 1e9 / (0.5 * inter.bytes_per_second))
    assert within == pytest.approx(7 * intra.seconds + 7 / 8 * 1e9 / (0.5 * intra.bytes_per_second))


def test_activations_are_those_of_the_rank_that_most_tokens_are_routed_to(
    a100s: Callable[[int], Cluster], fixed: Workload, query: Callable[..., StageQuery], mixture: ModelSpec
) -> None:
    memory = AnalyticModel(a100s(1), fixed, "bf16").memory
    even = replace(mixture, experts=replace(mixture.experts, num_dense_layers=0))  # all layers are alike
    whole, spread = (
        memory(query("actor_train", layout, model=even)).transient.terms[0].amount for layout in ("dp8", "dp8,ep8")
    )
    experts = even.experts
    assert experts
    busiest = experts.imbalance(fixed.max_tokens * 8, 8)
    assert busiest > 1.3
    routed = PICKED * (2 * even.hidden_size + 4 * experts.ffn_size)  # in and out; gate, up, activated gate, product
    others = 4 * even.hidden_size + even.attention_elements
    assert spread / whole == pytest.approx((others + busiest * routed) / (others + routed), rel=0.01)


@pytest.mark.parametrize("pp", [1, 2])
def test_replicas_that_share_experts_hold_together_what_one_would(mixture: ModelSpec, pp: int) -> None:
    whole = stage_parts(mixture, 2, pp)
    for ep in (2, 4, 8):
        for part, known in zip(stage_parts(mixture, 2, pp, ep), whole, strict=True):
            assert part.expert_params * ep == known.expert_params
            assert part.num_params + (ep - 1) * part.expert_params == known.num_params
            assert part.distinct_params(ep) == known.num_params


def test_weights_and_gradients_of_experts_are_divided_and_optimizer_state_is_as_before(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], mixture: ModelSpec, fixed: Workload
) -> None:
    memory = AnalyticModel(a100s(1), fixed, "bf16").memory
    alone, spread = (
        {t.name: t.amount for t in memory(query("actor_train", layout, model=mixture)).resident.terms}
        for layout in ("dp8", "dp8,ep8")
    )
    experts = 24 * NUM_EXPERTS * 3 * mixture.hidden_size * (mixture.ffn_size // 4)
    assert alone["weights"] - spread["weights"] == 2 * experts * 7 / 8
    assert alone["gradients"] - spread["gradients"] == 4 * experts * 7 / 8
    assert (alone["moments"], alone["main weights"]) == (spread["moments"], spread["main weights"])


@pytest.mark.parametrize(
    ("stage", "recompute", "exchanges"),
    [("ref_logprob", "none", 2), ("actor_train", "none", 4), ("actor_train", "full", 6)],
)
def test_tokens_go_to_their_experts_and_back_in_every_pass(
    *,
    ask: Callable[..., Cost],
    a100s: Callable[[int], Cluster],
    mixture: ModelSpec,
    stage: str,
    recompute: str,
    exchanges: int,
) -> None:
    """64 rows of 128 tokens on 8 replicas, in micro-batches of 2: each passes the 24 layers that have experts.
    All wait for the busiest replica."""
    network = Network(a100s(2), efficiency_of("cuda", "a100-80gb"))
    busiest = routing().imbalance(8 * 2 * 128, PICKED, NUM_EXPERTS, 8)
    copied_bytes = busiest * 2 * 128 * PICKED * mixture.hidden_size * 2
    once, _ = network.seconds(ALL_TO_ALL, Group(8, 8), copied_bytes)
    found = ask(stage, "dp8,ep8", 2, recompute)
    assert amount(found, EXCHANGE) == pytest.approx(4 * 24 * exchanges * once)
    assert amount(ask(stage, "dp8", 2, recompute), EXCHANGE) == 0


def test_sequence_parallelism_sends_a_part_and_gathers_copies(ask: Callable[..., Cost]) -> None:
    whole, part = (amount(ask("ref_logprob", f"tp2,dp4,ep4{sp}", 2), EXCHANGE) for sp in ("", ",sp"))
    assert 0 < part < whole


def test_copies_are_gathered_around_experts_that_are_cut_but_not_spread(
    ask: Callable[..., Cost], a100s: Callable[[int], Cluster], mixture: ModelSpec
) -> None:
    """64 rows of 128 tokens on 4 replicas of 2 ranks, in micro-batches of 2, through the 24 layers with experts."""
    network = Network(a100s(2), efficiency_of("cuda", "a100-80gb"))
    token_bytes = 2 * 128 * mixture.hidden_size * 2
    more = sum(
        network.seconds(operation, Group(2, 2), PICKED * token_bytes)[0]
        - network.seconds(operation, Group(2, 2), token_bytes)[0]
        for operation in (ALL_GATHER, REDUCE_SCATTER)
    )
    assert amount(ask("ref_logprob", "tp2,dp4,sp", 2), EXCHANGE) == pytest.approx(8 * 24 * more)
    assert amount(ask("ref_logprob", "tp2,dp4", 2), EXCHANGE) == 0


def test_decoding_reads_fewer_experts_the_further_they_are_spread(
    a100s: Callable[[int], Cluster], mixture: ModelSpec
) -> None:
    """16 rows reach every expert: what is read of them falls with the experts that a rank holds. A graph hides the
    launches."""
    assert mixture.experts is not None
    wide = replace(mixture, experts=replace(mixture.experts, ffn_size=4 * mixture.ffn_size, num_dense_layers=0))
    device, efficiency = a100s(1).device, efficiency_of("cuda", "a100-80gb")
    seconds = [
        AnalyticShard(wide, device, "bf16", efficiency, 1.0, spread=ep, framework=framework_named("vllm"))
        .time(TimedPass.DECODE, 16, 1, 100)
        .layer
        for ep in (1, 2, 8)
    ]
    an_expert = 2 * 3 * wide.hidden_size * 4 * mixture.ffn_size / device.memory_bytes_per_second
    assert 4 * an_expert < seconds[0] - seconds[1] < 6 * an_expert
    assert 3 * an_expert < seconds[1] - seconds[2] < 4.5 * an_expert


def test_replicas_wait_for_the_one_with_the_busiest_experts(a100s: Callable[[int], Cluster]) -> None:
    """Of many tokens, whose experts are all read for little: spread over 8, each rank computes as much on average."""
    experts = Experts(num_experts=128, experts_per_token=8, ffn_size=1536)
    device, efficiency = a100s(1).device, efficiency_of("cuda", "a100-80gb")
    kernels = Kernels(device, efficiency, flops_per_second=device.flops_per_second["bf16"], weight_bytes=2, size=2)
    alone, spread = (Mixture(kernels, experts, 4096, spread=ep, size=2).seconds(32768, trains=False) for ep in (1, 8))
    assert spread / alone == pytest.approx(routing().imbalance(8 * 32768, 8, 128, 8), rel=0.05)


def test_an_update_reduces_experts_over_the_replicas_that_hold_them(ask: Callable[..., Cost]) -> None:
    alone, spread = (ask("actor_train", layout) for layout in ("dp16", "dp16,ep8"))
    assert amount(spread, "gradient reduction") < amount(alone, "gradient reduction")
    assert amount(spread, "optimizer") == amount(alone, "optimizer")


def test_a_refit_brings_each_rank_its_own_experts_only(
    a100s: Callable[[int], Cluster], fixed: Workload, mixture: ModelSpec
) -> None:
    move = AnalyticModel(a100s(2), fixed, "bf16").refit_seconds
    source = Layout(tp=2, dp=4)
    alone, spread = (
        amount(move(RefitQuery(model=mixture, source=source, target=Layout(dp=8, ep=ep), overlap=0)), "weight bytes")
        for ep in (1, 8)
    )
    held = [stage_parts(mixture, 1, 1, ep)[0].num_params for ep in (1, 8)]
    assert spread / alone == pytest.approx(held[1] / held[0])


@pytest.mark.parametrize("stage", ["actor_generate", "ref_logprob", "actor_train"])
def test_a_group_of_one_changes_nothing(ask: Callable[..., Cost], stage: str) -> None:
    assert ask(stage, "dp8", slots=4) == ask(stage, "dp8,ep1", slots=4)
