"""Costs of a model that is trained by an adapter: less state, no gradients of weights, and two more products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.communication import stored_adapter_size
from meshwright.cost_models.compute import AnalyticShard
from meshwright.cost_models.cost import Cost
from meshwright.cost_models.kernels import Kernels, LowRank
from meshwright.cost_models.params import stage_parts
from meshwright.cost_models.protocol import RefitQuery, StageQuery
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.experts import Experts
from meshwright.profiles.frameworks import engine_named, own_framework
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_parts.adapter import ATTENTION_LINEARS, Adapter
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.table import TimedPass
from meshwright.profiles.workload import Workload


@pytest.fixture
def adapted(llama: ModelSpec) -> ModelSpec:
    return replace(llama, adapter=Adapter(rank=16, alpha=32.0))


@pytest.fixture
def shard(a100s: Callable[[int], Cluster]) -> Callable[[ModelSpec], AnalyticShard]:
    def of(model: ModelSpec) -> AnalyticShard:
        return AnalyticShard(model, a100s(1).device, "bf16", efficiency_of("cuda", "a100-80gb"), 1.0)

    return of


@pytest.fixture
def model(a100s: Callable[[int], Cluster], fixed: Workload) -> AnalyticModel:
    return AnalyticModel(a100s(1), fixed, "bf16")


@pytest.mark.parametrize("rows", [1, 8])
def test_the_backward_pass_has_no_gradients_of_weights_and_costs_about_as_much_as_the_forward(
    shard: Callable[[ModelSpec], AnalyticShard], llama: ModelSpec, adapted: ModelSpec, rows: int
) -> None:
    """Products of weights are two of three; what is left, attention and what is between, is the same."""
    plain, low = (shard(one).time(TimedPass.TRAIN, rows, 1024) for one in (llama, adapted))
    once = shard(llama).time(TimedPass.FORWARD, rows, 1024)
    assert 0.6 < low.layer / plain.layer < 0.95
    assert low.layer > 1.8 * once.layer
    assert low.ends <= plain.ends  # equal where the host launches slower than the device computes


def test_a_forward_pass_takes_two_more_products_for_each_linear(
    shard: Callable[[ModelSpec], AnalyticShard], llama: ModelSpec, adapted: ModelSpec
) -> None:
    plain, low = (shard(one).time(TimedPass.FORWARD, 8, 1024) for one in (llama, adapted))
    assert 1.0 < low.layer / plain.layer < 1.3
    assert low.ends == plain.ends


def test_seconds_grow_with_the_rank_and_with_the_linears(
    shard: Callable[[ModelSpec], AnalyticShard], adapted: ModelSpec
) -> None:
    seconds = [
        shard(replace(adapted, adapter=Adapter(rank=rank, alpha=1.0, targets=targets)))
        .time(TimedPass.TRAIN, 8, 1024)
        .layer
        for rank, targets in (
            (16, ATTENTION_LINEARS),
            (16, Adapter(rank=1, alpha=1.0).targets),
            (512, ATTENTION_LINEARS),
        )
    ]
    assert seconds[0] < min(seconds[1:])


def test_both_ways_an_adapter_has_three_times_its_products(a100s: Callable[[int], Cluster], adapted: ModelSpec) -> None:
    efficiency = efficiency_of("cuda", "a100-80gb")
    kernels = Kernels(a100s(1).device, efficiency, flops_per_second=1e14, weight_bytes=2, size=2)
    products = LowRank(adapted, kernels, 2)
    assert 2 < products.seconds(8192, trains=True) / products.seconds(8192, trains=False) < 3
    assert (products.num_kernels, products.num_started) == (12, 8)


def test_frozen_experts_have_no_gradients_of_their_weights(
    shard: Callable[[ModelSpec], AnalyticShard], llama: ModelSpec
) -> None:
    mixed = replace(llama, experts=Experts(num_experts=8, experts_per_token=2, ffn_size=llama.ffn_size // 4))
    adapted = replace(mixed, adapter=Adapter(rank=16, alpha=16.0, targets=ATTENTION_LINEARS))
    plain, low = (shard(one).time(TimedPass.TRAIN, 8, 1024) for one in (mixed, adapted))
    assert low.layer < 0.9 * plain.layer


@pytest.mark.parametrize("layout", ["dp8", "tp2,sp,pp2,dp2", "tp8"])
def test_gradients_moments_and_fp32_weights_are_those_of_the_adapter(
    model: AnalyticModel, query: Callable[..., StageQuery], adapted: ModelSpec, layout: str
) -> None:
    memory = model.memory(query("actor_train", layout, model=adapted)).resident
    whole = model.memory(query("actor_train", layout)).resident
    cut = Layout.parse(layout)
    part = max(stage_parts(adapted, cut.tp, cut.pp), key=lambda part: part.num_params)
    assert memory.amount("weights") == 2 * part.num_params
    assert memory.amount("weights") == whole.amount("weights") + 2 * part.adapter_params
    assert memory.amount("gradients") == 4 * part.adapter_params
    assert memory.amount("moments") == 8 * part.adapter_params / cut.dp
    assert memory.amount("main weights") == 4 * part.adapter_params / cut.dp


def test_all_stages_together_hold_the_whole_adapter(adapted: ModelSpec) -> None:
    first, last = stage_parts(adapted, 1, 2)
    assert first.trained.num_params + last.trained.num_params == adapted.trainable_params
    assert first.num_params + last.num_params == adapted.num_params + adapted.trainable_params


def test_a_refit_moves_the_adapter_alone(model: AnalyticModel, llama: ModelSpec, adapted: ModelSpec) -> None:
    moved = [
        model.refit_seconds(RefitQuery(model=one, source=Layout(tp=2), target=Layout(dp=2), overlap=0)).amount(
            "weight bytes"
        )
        for one in (llama, adapted)
    ]
    assert moved[1] / moved[0] == pytest.approx(adapted.trainable_params / llama.num_params)


def test_the_loader_of_an_engine_gets_the_adapter_alone_from_a_trainer_that_does_not_merge_it(
    a100s: Callable[[int], Cluster], fixed: Workload, llama: ModelSpec
) -> None:
    """In PEFT's format queries, keys and values have an A each, and so have gate and up projection."""
    adapted = replace(llama, adapter=Adapter(rank=16, alpha=32.0, targets=("linear_proj", "linear_qkv")))
    move = RefitQuery(model=adapted, source=Layout(tp=2), target=Layout(dp=2), overlap=0, generates=True)
    hidden, attention, keys = llama.hidden_size, llama.attention_size, llama.kv_size
    elements = llama.num_layers * 16 * (3 * hidden + attention + 2 * keys + attention + hidden)
    assert stored_adapter_size(adapted) == (8 * llama.num_layers, elements)

    def refit(model: ModelSpec, **framework: bool) -> Cost:
        trainer = own_framework("cuda").model_copy(update=framework)
        engine = engine_named("vllm")
        costs = AnalyticModel(a100s(1), fixed, "bf16", framework=trainer, engine=engine)
        return costs.refit_seconds(replace(move, model=model))

    whole = refit(llama)
    assert refit(adapted).amount("weight bytes") == pytest.approx(
        whole.amount("weight bytes") * elements / llama.num_params
    )
    assert refit(adapted).amount("weight messages") == pytest.approx(whole.amount("weight messages") * 8 / 6)
    assert refit(adapted, merged_adapters=True) == whole


def test_an_update_exchanges_and_steps_the_adapter_alone(
    model: AnalyticModel, query: Callable[..., StageQuery], llama: ModelSpec, adapted: ModelSpec
) -> None:
    one, other = (model.seconds(query("actor_train", "dp8", model=spec)) for spec in (llama, adapted))
    for name in ("gradient reduction", "optimizer", "parameter gather"):
        assert 0 < other.amount(name) < one.amount(name) / 20


def test_tensor_parallel_ranks_exchange_what_lies_between_the_two_products(
    model: AnalyticModel, query: Callable[..., StageQuery], llama: ModelSpec, adapted: ModelSpec
) -> None:
    """With sequence parallelism nothing is gathered again for gradients of weights, more than that in long batches."""
    term = "tensor-parallel collectives"
    for stage, layout, is_more in (
        ("ref_logprob", "tp8", True),
        ("actor_train", "tp8", True),
        ("actor_train", "tp8,sp", False),
    ):
        one, other = (model.seconds(query(stage, layout, 64, model=spec)).amount(term) for spec in (llama, adapted))
        assert (other > one) == is_more


def test_the_least_that_training_takes_is_below_what_it_takes(
    model: AnalyticModel, query: Callable[..., StageQuery], llama: ModelSpec, adapted: ModelSpec
) -> None:
    stage = PPO_GRAPH.by_name["actor_train"]
    least, plain = (model.lower_bound_seconds(stage, spec, 8, 0) for spec in (adapted, llama))
    assert least == pytest.approx(plain * 2 / 3)
    assert least < model.seconds(query("actor_train", "dp8", model=adapted)).total


@pytest.fixture
def experts(llama: ModelSpec) -> ModelSpec:
    """Llama with 8 experts of a quarter of its width, a shared one, and an adapter on all linears."""
    mixed = Experts(
        num_experts=8, experts_per_token=2, ffn_size=llama.ffn_size // 4, shared_ffn_size=llama.ffn_size // 4
    )
    return replace(llama, experts=mixed, adapter=Adapter(rank=16, alpha=32.0))


@pytest.mark.parametrize("timed_pass", [TimedPass.FORWARD, TimedPass.TRAIN, TimedPass.DECODE])
def test_adapters_of_experts_take_seconds_that_grow_with_the_linears_and_the_rank(
    shard: Callable[[ModelSpec], AnalyticShard], experts: ModelSpec, timed_pass: TimedPass
) -> None:
    adapters = (
        Adapter(rank=16, alpha=1.0, targets=ATTENTION_LINEARS),
        Adapter(rank=16, alpha=1.0, targets=(*ATTENTION_LINEARS, "linear_fc1")),
        Adapter(rank=16, alpha=1.0),
        Adapter(rank=256, alpha=1.0),
    )
    seconds = [shard(replace(experts, adapter=one)).time(timed_pass, 8, 1024).layer for one in adapters]
    assert seconds == sorted(set(seconds))


@pytest.mark.parametrize(
    ("layout", "others"), [("dp8,ep8", 1), ("dp8", 8), ("tp2,dp4,ep4,sp", 1), ("tp2,dp4,ep8,etp1,sp", 1)]
)
def test_adapters_of_experts_are_held_and_trained_by_those_who_hold_the_experts(
    model: AnalyticModel, query: Callable[..., StageQuery], experts: ModelSpec, layout: str, others: int
) -> None:
    """Each rank has one expert or all; its state is sharded over the `others` that hold the same."""
    cut = Layout.parse(layout)
    [part] = stage_parts(experts, cut.tp, 1, cut.expert_replicas, folded=cut.fold_size)
    assert part.adapter_expert_params == pytest.approx(
        experts.shard(cut.tp).adapter_expert_params_between(0, experts.num_layers, cut.fold_size) / cut.expert_replicas
    )
    memory = model.memory(query("actor_train", layout, model=experts)).resident
    assert memory.amount("gradients") == pytest.approx(4 * part.adapter_params)
    plain = part.adapter_params - part.adapter_expert_params
    expected = 8 * (plain / cut.dp + part.adapter_expert_params / others)
    assert memory.amount("moments") == pytest.approx(expected)


def test_the_adapter_of_experts_is_a_small_part_of_them_and_grows_with_their_number(experts: ModelSpec) -> None:
    more = replace(experts, experts=replace(experts.experts, num_experts=16))  # type: ignore[type-var]
    assert 0 < experts.trainable_params < more.trainable_params < 0.05 * more.num_params
