"""Sequences cut over ranks: each computes a part of the tokens and of the scores, and keys and values are gathered."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.blended import BlendedModel
from meshwright.cost_models.communication import ALL_GATHER, REDUCE_SCATTER, Group, Network, groups_of
from meshwright.cost_models.compute import AnalyticShard
from meshwright.cost_models.cost import Cost, Source
from meshwright.cost_models.micro_batches import ContextShard, context_parallel_tokens
from meshwright.cost_models.protocol import RefitQuery, StageQuery
from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.harness import record
from meshwright.profiles.layout import Layout
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.table import Point, Table, TimedPass, shape_of
from meshwright.profiles.workload import Workload
from tests.cost_models.tables import PROVENANCE, sample

TOKENS = 32768
EXCHANGE = "context-parallel collectives"
GATHERED = "gathered keys and values"


@pytest.fixture
def long() -> Workload:
    """16 sequences of 32k tokens."""
    prompt, response = LengthSpec(max=1024, fixed=1024), LengthSpec(max=TOKENS - 1024, fixed=TOKENS - 1024)
    return Workload(batch_size=16, prompt=prompt, response=response)


@pytest.fixture
def model(a100s: Callable[[int], Cluster], long: Workload) -> AnalyticModel:
    return AnalyticModel(a100s(4), long, "bf16")


def amount(cost: Cost, name: str) -> float:
    return sum(term.amount for term in cost.terms if term.name == name)


def test_context_ranks_are_neighbours_and_share_gradients_with_the_replicas(a100s: Callable[[int], Cluster]) -> None:
    groups = groups_of(Layout(tp=2, cp=2, dp=8), a100s(4))
    assert (groups.tensor, groups.context, groups.data) == (Group(2, 2), Group(2, 2), Group(16, 4))
    wide = groups_of(Layout(tp=8, cp=4), a100s(4))
    assert (wide.context, wide.data) == (Group(4, 1), Group(4, 1))


@pytest.mark.parametrize("stage", ["ref_logprob", "critic_value", "actor_train", "critic_train"])
@pytest.mark.parametrize("layout", ["tp1,dp16,cp2", "tp2,pp2,dp4,cp2,sp", "tp8,cp4"])
def test_the_terms_sum_to_the_cost(
    model: AnalyticModel, query: Callable[..., StageQuery], stage: str, layout: str
) -> None:
    cost = model.seconds(query(stage, layout))
    assert cost.total == pytest.approx(sum(term.amount for term in cost.terms))
    assert amount(cost, EXCHANGE) > 0


def test_keys_and_values_are_gathered_again_for_the_backward_pass_and_their_gradients_scattered(
    model: AnalyticModel, query: Callable[..., StageQuery], a100s: Callable[[int], Cluster], llama: ModelSpec
) -> None:
    """Of all 32 layers and all rows, 2 x 2 bytes for each token and each element of the rank's key heads."""
    network = Network(a100s(4), efficiency_of("cuda", "a100-80gb"))
    group, num_bytes = Group(4, 4), 2 * 2 * TOKENS * llama.kv_size / 2
    gather = network.seconds(ALL_GATHER, group, num_bytes)[0]
    scatter = network.seconds(REDUCE_SCATTER, group, num_bytes)[0]
    forward, train, full = (
        amount(model.seconds(query(*asked)), EXCHANGE)
        for asked in (
            ("ref_logprob", "tp2,dp4,cp4"),
            ("actor_train", "tp2,dp4,cp4"),
            ("actor_train", "tp2,dp4,cp4", 1, "full"),
        )
    )
    passes = 32 * 16 / 4
    assert forward == pytest.approx(passes * gather)
    assert train == pytest.approx(passes * (2 * gather + scatter))
    assert full == pytest.approx(passes * (3 * gather + scatter))


def test_across_nodes_keys_and_values_travel_on_the_slower_tier(
    model: AnalyticModel, query: Callable[..., StageQuery]
) -> None:
    within, across = (amount(model.seconds(query("ref_logprob", layout)), EXCHANGE) for layout in ("cp4", "tp8,cp4"))
    assert across > within / 8


def test_a_rank_computes_a_part_of_every_layer(model: AnalyticModel, query: Callable[..., StageQuery]) -> None:
    """Products, scores and everything by elements, of which small sizes lose a little."""
    for stage in ("ref_logprob", "actor_train"):
        whole, part = (amount(model.seconds(query(stage, layout)), "layers") for layout in ("tp2", "tp2,cp4"))
        assert whole / 4 <= part < 1.05 * whole / 4


def test_a_context_rank_updates_what_a_replica_of_its_own_would(
    model: AnalyticModel, query: Callable[..., StageQuery]
) -> None:
    cut, replicas = (model.seconds(query("actor_train", layout)) for layout in ("tp2,dp4,cp4", "tp2,dp16"))
    for name in ("gradient reduction", "optimizer", "parameter gather"):
        assert amount(cut, name) == amount(replicas, name)
    memory = [model.memory(query("actor_train", layout)).resident for layout in ("tp2,dp4,cp4", "tp2,dp16")]
    assert memory[0] == memory[1]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_more_context_ranks_never_need_more_memory(
    model: AnalyticModel, query: Callable[..., StageQuery], recompute: str
) -> None:
    found = [model.memory(query("actor_train", f"tp2,cp{cp}", 1, recompute)).transient for cp in (1, 2, 4, 8)]
    for fewer, more in pairwise(found):
        for name in ("activations", "working set", "logits"):
            assert amount(more, name) <= amount(fewer, name)
        assert more.total < fewer.total
    assert amount(found[0], GATHERED) == 0
    assert amount(found[1], GATHERED) == amount(found[3], GATHERED) == 3 * 2 * 2 * TOKENS * 4096 / 2


@pytest.mark.parametrize("tokens", [1, 7, 4096, 4097])
def test_the_parts_of_a_sequence_hold_it(tokens: int) -> None:
    assert context_parallel_tokens(tokens, 1) == tokens
    for cp in (2, 3, 4, 8):
        assert tokens <= cp * context_parallel_tokens(tokens, cp) < tokens + 2 * cp


def test_a_refit_to_context_ranks_is_one_to_as_many_replicas(model: AnalyticModel, llama: ModelSpec) -> None:
    source, cut = Layout(tp=4, dp=2), Layout(tp=2, dp=2, cp=4)
    assert cut.weight_layout == Layout(tp=2, dp=8)
    found = [
        model.refit_seconds(RefitQuery(model=llama, source=source, target=to, overlap=0))
        for to in (cut, cut.weight_layout)
    ]
    assert found[0] == found[1]


def test_what_a_table_knows_of_parts_is_measured_and_attending_beyond_them_is_not(
    a100s: Callable[[int], Cluster], long: Workload, llama: ModelSpec, query: Callable[..., StageQuery]
) -> None:
    """A table that says what the equations say gives their answer, named for both."""
    efficiency = efficiency_of("cuda", "a100-80gb")
    measurements = []
    for timed_pass in (TimedPass.FORWARD, TimedPass.TRAIN, TimedPass.OPTIMIZER):
        for layers in (1, 2):
            for tokens in (0,) if timed_pass is TimedPass.OPTIMIZER else (TOKENS // 4, TOKENS):
                rows = int(timed_pass is not TimedPass.OPTIMIZER)
                point = Point(
                    shape=shape_of(llama, 1),
                    num_layers=layers,
                    timed_pass=timed_pass,
                    rows=rows,
                    tokens=tokens,
                    context=0,
                )
                shard = AnalyticShard(llama, a100s(1).device, "bf16", efficiency, 1.0)
                layer, ends, _ = shard.time(timed_pass, rows, tokens)
                measurements.append(record(point, sample(layers * layer + ends)))
    table = Table(provenance=PROVENANCE, measurements=tuple(measurements))
    models = BlendedModel(table, a100s(4), long, "bf16"), AnalyticModel(a100s(4), long, "bf16")
    for stage in ("ref_logprob", "actor_train"):
        blended, analytic = (one.seconds(query(stage, "cp4")) for one in models)
        for name in ("layers", "embedding and head"):
            assert amount(blended, name) == pytest.approx(amount(analytic, name), rel=1e-6)
        (layers,) = (term for term in blended.terms if term.name == "layers")
        assert layers.source is Source.ANALYTIC
    shard = AnalyticShard(llama, a100s(1).device, "bf16", efficiency, 1.0)
    own = ContextShard(shard, shard, 4).time(TimedPass.FORWARD, 0.25, TOKENS)
    assert own.layer == pytest.approx(shard.time(TimedPass.FORWARD, 0.25, TOKENS).layer)
