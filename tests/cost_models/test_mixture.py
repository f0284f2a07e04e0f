"""Costs of models with experts: total parameters in memory, active ones in time, and weights that few tokens reach."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.compute import AnalyticShard
from meshwright.cost_models.kernels import Kernels, Mixture
from meshwright.cost_models.params import stage_parts
from meshwright.cost_models.protocol import StageQuery
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.experts import Experts, LatentAttention
from meshwright.profiles.frameworks import framework_named
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.packing import BLOCK_TOKENS
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.table import TimedPass
from meshwright.profiles.workload import Workload


@pytest.fixture
def mixture(llama: ModelSpec) -> ModelSpec:
    """Llama-2 7B whose MLP is cut into 8 experts of a quarter of its width, of which a token passes 2."""
    return replace(llama, experts=Experts(num_experts=8, experts_per_token=2, ffn_size=llama.ffn_size // 4))


@pytest.fixture
def latent(llama: ModelSpec) -> ModelSpec:
    sizes = LatentAttention(query_rank=1536, kv_rank=512, nope_dim=96, rope_dim=32, value_dim=128)
    return replace(llama, latent=sizes)


@pytest.fixture
def time(a100s: Callable[[int], Cluster]) -> Callable[..., float]:
    def of(
        model: ModelSpec, timed_pass: TimedPass, rows: int, tokens: int, context: int = 0, *, framework: str = "runtime"
    ) -> float:
        device, efficiency = a100s(1).device, efficiency_of("cuda", "a100-80gb")
        shard = AnalyticShard(model, device, "bf16", efficiency, 1.0, framework=framework_named(framework))
        return shard.time(timed_pass, rows, tokens, context).layer

    return of


def test_memory_holds_all_experts_and_optimizes_them(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], mixture: ModelSpec, fixed: Workload
) -> None:
    memory = AnalyticModel(a100s(1), fixed, "bf16").memory
    assert memory(query("ref_logprob", model=mixture)).resident.total == 2 * mixture.num_params
    assert memory(query("actor_train", model=mixture)).resident.total == 18 * mixture.num_params


def test_many_tokens_take_longer_than_a_dense_model_of_the_active_width_by_what_grouped_products_lack(
    time: Callable[..., float], mixture: ModelSpec, llama: ModelSpec
) -> None:
    dense, known = replace(llama, ffn_size=llama.ffn_size // 2), efficiency_of("cuda", "a100-80gb")
    for timed_pass in (TimedPass.FORWARD, TimedPass.TRAIN):
        ratio = time(mixture, timed_pass, 16, 1024) / time(dense, timed_pass, 16, 1024)
        assert 1.2 < ratio < known.gemm.flops / known.grouped.flops


def test_a_token_alone_takes_the_launches_of_its_layer_of_what_routes_it_and_of_experts_that_run_one_by_one(
    time: Callable[..., float], mixture: ModelSpec, llama: ModelSpec, a100s: Callable[[int], Cluster]
) -> None:
    efficiency = efficiency_of("cuda", "a100-80gb")
    more = (efficiency.routing_kernels + 8 * efficiency.expert_kernels) * a100s(1).device.launch_seconds
    for timed_pass, passes in ((TimedPass.FORWARD, 1), (TimedPass.TRAIN, 3)):
        assert time(mixture, timed_pass, 1, 1) - time(llama, timed_pass, 1, 1) == pytest.approx(passes * more)


def test_a_decode_reads_the_experts_that_its_rows_reach(time: Callable[..., float], mixture: ModelSpec) -> None:
    """One row reads two of eight; hundreds read all, for little more than their bytes. A graph hides the launches."""
    device_bytes = 2.039e12
    one, *some, many = (
        time(mixture, TimedPass.DECODE, rows, 1, 100, framework="vllm") for rows in (1, 2, 4, 8, 64, 256)
    )
    all_experts = 2 * 3 * mixture.hidden_size * 8 * (mixture.ffn_size // 4) / device_bytes
    assert many - one > 0.75 * all_experts
    assert all(few <= more for few, more in pairwise((one, *some, many)))


def test_dense_layers_at_the_bottom_count_as_what_they_are(
    time: Callable[..., float], mixture: ModelSpec, llama: ModelSpec
) -> None:
    assert mixture.experts is not None
    half = replace(mixture, experts=replace(mixture.experts, num_dense_layers=16))
    mean = (time(mixture, TimedPass.FORWARD, 4, 512) + time(llama, TimedPass.FORWARD, 4, 512)) / 2
    assert time(half, TimedPass.FORWARD, 4, 512) == pytest.approx(mean, rel=0.03)
    first, last = stage_parts(half, 1, 2)
    assert last.num_params - first.num_params == 16 * (mixture.layer_params - llama.layer_params) + llama.hidden_size


def test_latent_attention_leaves_less_in_the_cache_whatever_tp(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], latent: ModelSpec, fixed: Workload
) -> None:
    memory = AnalyticModel(a100s(1), fixed, "bf16").memory
    for layout in ("tp1", "tp8"):
        terms = memory(query("actor_generate", layout, slots=10, model=latent, batches_in_flight=2)).resident.terms
        blocks = fixed.cache_need(Schedule(generation_slots=10, batches_in_flight=2), 1).blocks + 1
        assert {t.name: t.amount for t in terms}["kv cache"] == 2 * blocks * BLOCK_TOKENS * 32 * (512 + 32) * 2


def test_decoding_over_a_long_cache_is_quicker_with_latent_attention(
    time: Callable[..., float], latent: ModelSpec, llama: ModelSpec
) -> None:
    assert time(latent, TimedPass.DECODE, 64, 1, 8192) < 0.3 * time(llama, TimedPass.DECODE, 64, 1, 8192)


@pytest.mark.parametrize("layout", ["dp8", "tp2,pp2,dp2", "tp4,dp2,sp"])
def test_every_stage_of_a_mixture_has_positive_costs(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], mixture: ModelSpec, fixed: Workload, layout: str
) -> None:
    model = AnalyticModel(a100s(1), fixed, "bf16")
    for stage in PPO_GRAPH.stages:
        if stage.generates and layout.endswith("sp"):
            continue
        question = query(stage.name, layout, 4, slots=8, model=mixture)
        assert all(term.amount > 0 for term in model.seconds(question).terms)
        assert model.memory(question).peak_bytes > 0


def test_a_rank_takes_the_products_of_its_experts_and_what_brings_tokens_to_them(laws: Kernels) -> None:
    """256 copies of tokens for 4 experts: up and gate, down, and reading and writing around them."""
    efficiency = efficiency_of("cuda", "a100-80gb")
    experts = Experts(num_experts=8, experts_per_token=2, ffn_size=512)
    found = Mixture(laws, experts, 1024, spread=2, size=2).seconds_of_rows(256, 4)
    products = laws.grouped(256, 4, 1024, 1024) + laws.grouped(256, 4, 512, 1024)
    moved = laws.elementwise(256 * 2 * (3 * 512 + 4 * 1024))
    assert found == pytest.approx(efficiency.grouped.seconds + products + moved)


@pytest.mark.parametrize("count", [1, 64, 4096])
def test_experts_that_are_spread_wait_for_the_busiest_rank(laws: Kernels, count: int) -> None:
    experts = Experts(num_experts=8, experts_per_token=2, ffn_size=512)
    spread = Mixture(laws, experts, 1024, spread=4, size=2)
    mean = spread.seconds_of_rows(count * 2, experts.num_selected(count * 4) / 4)
    assert spread.seconds(count, trains=False) >= mean
    assert spread.seconds(count, trains=True) > 2 * spread.seconds(count, trains=False)
