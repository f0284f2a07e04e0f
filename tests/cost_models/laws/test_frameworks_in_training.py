"""Laws of what frameworks and recipes state about training: sharded weights, number formats, kernels and the host."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.compute import AnalyticShard
from meshwright.cost_models.cost import Cost
from meshwright.cost_models.protocol import StageQuery
from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.experts import Experts
from meshwright.profiles.frameworks import Framework, framework_named
from meshwright.profiles.hardware import Cluster, device_named
from meshwright.profiles.model_parts.adapter import Adapter
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.table import TimedPass
from meshwright.profiles.workload import Workload


@pytest.fixture
def step(a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], fixed: Workload) -> Callable[..., Cost]:
    """Seconds of training with a framework on 16 GPUs."""

    def of(framework: Framework, layout: str = "dp16", **changes: Any) -> Cost:
        asked = replace(query("actor_train", layout, 1), **changes)
        return AnalyticModel(a100s(2), fixed, "bf16", framework=framework).seconds(asked)

    return of


def test_sharded_weights_are_gathered_in_every_micro_batch_and_not_in_the_update(step: Callable[..., Cost]) -> None:
    plain = framework_named("megatron-core")
    sharded = plain.model_copy(update={"sharded_weights": True})
    names = {term.name for term in step(sharded).terms}
    assert "weight gathers" in names
    assert names.isdisjoint({"gradient reduction", "parameter gather"})
    assert "weight gathers" not in {term.name for term in step(plain).terms}


def test_compute_hides_gathers_that_are_shorter(step: Callable[..., Cost]) -> None:
    """A rank has 4 rows of 128 tokens, whose layers take less time than gathers over two nodes, unless the host is
    slow; a replica alone gathers nothing."""
    sharded = framework_named("megatron-core").model_copy(update={"sharded_weights": True})
    slow = sharded.model_copy(update={"launch_seconds": 1e-3})
    assert step(sharded).amount("weight gathers") > 0
    assert step(slow).amount("weight gathers") == step(sharded, "dp1").amount("weight gathers") == 0


def test_frozen_weights_are_gathered_and_have_no_gradients_to_scatter(
    step: Callable[..., Cost], llama: ModelSpec
) -> None:
    sharded = framework_named("megatron-core").model_copy(update={"sharded_weights": True, "launch_seconds": 0.0})
    adapted = replace(llama, adapter=Adapter(rank=8, alpha=8.0))
    assert 0 < step(sharded, model=adapted).amount("weight gathers") < step(sharded).amount("weight gathers")


def shard_on(
    device_name: str, model: ModelSpec, framework: Framework, linear_format: str | None = None
) -> AnalyticShard:
    device, _, _ = device_named(device_name)
    efficiency = efficiency_of("cuda", device_name)
    return AnalyticShard(model, device, "bf16", efficiency, 1.0, framework=framework, linear_format=linear_format)


def train(shard: AnalyticShard, tokens: int = 8192) -> float:
    return shard.time(TimedPass.TRAIN, 1, tokens).layer


def test_operators_one_after_the_other_move_more_in_each_layer(llama: ModelSpec) -> None:
    """Two norms, rotations of queries and keys, and a gate; three times as much with gradients."""
    fused = framework_named("megatron-core").model_copy(update={"launch_seconds": 0.0})
    eager = fused.model_copy(update={"eager_operators": True})
    extra = train(shard_on("h200", llama, eager)) - train(shard_on("h200", llama, fused))
    elements = 2 * 16 * llama.hidden_size + 8 * 2 * llama.attention_size + 2 * llama.ffn_size
    bandwidth = 4.8e12 * efficiency_of("cuda", "h200").elementwise_bytes
    assert extra == pytest.approx(3 * 8192 * 2 * elements / bandwidth, rel=0.02)


def test_fewer_bits_in_linears_are_quicker_and_less_than_their_peaks_say(llama: ModelSpec) -> None:
    framework = framework_named("megatron-core")
    sixteen, eight = (train(shard_on("h100-sxm", llama, framework, name)) for name in (None, "fp8"))
    assert 1.2 < sixteen / eight < 2
    four = train(shard_on("b200", llama, framework, "fp4"))
    assert four < train(shard_on("b200", llama, framework, "fp8")) < train(shard_on("b200", llama, framework))


def test_attention_takes_longer_in_older_kernels_and_most_of_all_on_newer_devices(llama: ModelSpec) -> None:
    """On an A100 FlashAttention 2 is the kernel that was measured."""
    native = framework_named("megatron-core")

    def slower(device_name: str, kernel: str) -> float:
        older = native.model_copy(update={"attention_kernel": kernel})
        attention = [shard_on(device_name, llama, one).attention(1, 65536) for one in (older, native)]
        return float(attention[0] / attention[1])

    assert slower("a100-80gb", "flash-2") == 1
    assert 1.4 < slower("h100-sxm", "flash-2") < slower("h100-sxm", "flash-1")
    assert slower("h100-sxm", "flash-2") < slower("b200", "flash-2")


def test_the_host_is_quicker_without_gradients_and_for_frozen_weights(llama: ModelSpec) -> None:
    framework, few = framework_named("megatron-core"), 16
    assert framework.launch_seconds == 2 * (framework.forward_launch_seconds or 0)
    trained, forward = (
        shard_on("h100-sxm", llama, framework).time(one, 1, few).layer for one in (TimedPass.TRAIN, TimedPass.FORWARD)
    )
    assert trained == pytest.approx(6 * forward)
    adapted = replace(llama, adapter=Adapter(rank=8, alpha=8.0))
    kernels, further = 30, 3 * 4  # of a layer, and of the adapters of four linears
    expected = (2 * kernels + 3 * further) / (3 * kernels) * trained
    assert train(shard_on("h100-sxm", adapted, framework), few) == pytest.approx(expected)


def test_graphs_that_leave_out_experts_leave_their_dispatch_to_the_host(llama: ModelSpec) -> None:
    mixture = replace(llama, experts=Experts(num_experts=8, experts_per_token=2, ffn_size=1024))
    whole = framework_named("megatron-core").model_copy(update={"cuda_graphs": True})
    partly = whole.model_copy(update={"records_experts": False})
    few = 16
    assert train(shard_on("h100-sxm", mixture, partly), few) > 2 * train(shard_on("h100-sxm", mixture, whole), few)
    assert train(shard_on("h100-sxm", llama, partly), few) == train(shard_on("h100-sxm", llama, whole), few)


@pytest.fixture
def mixture(llama: ModelSpec) -> ModelSpec:
    """A model with 64 experts of which a token passes 8, all loaded alike."""
    experts = Experts(num_experts=64, experts_per_token=8, ffn_size=1024, balance="forced")
    return replace(llama, experts=experts)


EXPERT_EXCHANGES = "expert-parallel collectives"


def test_sharded_experts_are_gathered_by_the_replicas_that_share_them(
    step: Callable[..., Cost], mixture: ModelSpec
) -> None:
    """Of 16 replicas that each have 4 of 64 experts no two share any, so that none are gathered."""
    sharded = framework_named("megatron-core").model_copy(update={"sharded_weights": True, "launch_seconds": 0.0})
    everywhere, spread = (step(sharded, layout, model=mixture) for layout in ("dp16", "dp16,ep16"))
    dense = step(sharded, model=replace(mixture, experts=None, ffn_size=1))
    assert spread.amount("weight gathers") < 1.5 * dense.amount("weight gathers")
    assert spread.amount("weight gathers") < everywhere.amount("weight gathers") / 10


def test_merged_copies_are_sent_once_to_each_node_and_as_often_as_before_within_one(
    step: Callable[..., Cost], mixture: ModelSpec
) -> None:
    """On two nodes the 8 copies of a token become 2 (1 - 1/2^8); what a message costs to start stays."""
    plain = framework_named("megatron-core")
    merged = plain.model_copy(update={"merged_copies": True})

    def seconds(framework: Framework, layout: str, hidden: int) -> float:
        wide = replace(mixture, hidden_size=hidden, num_heads=hidden // 128, num_kv_heads=hidden // 128)
        return step(framework, layout, model=wide).amount(EXPERT_EXCHANGES)

    assert seconds(merged, "dp8,ep8", 4096) == seconds(plain, "dp8,ep8", 4096)
    more = seconds(merged, "dp16,ep16", 65536) - seconds(merged, "dp16,ep16", 32768)
    copies = 8 * more / (seconds(plain, "dp16,ep16", 65536) - seconds(plain, "dp16,ep16", 32768))
    assert copies == pytest.approx(2 * (1 - 0.5**8), rel=1e-6)


@pytest.mark.parametrize("timed", [TimedPass.TRAIN, TimedPass.FORWARD])
def test_a_host_that_waits_for_the_tokens_of_each_expert_is_not_ahead_in_forward_passes(
    mixture: ModelSpec, timed: TimedPass
) -> None:
    """53 kernels of 30 us besides the device's time, where it is longer; a dense layer has none."""
    waiting = framework_named("megatron-core")
    ahead = waiting.model_copy(update={"counts_on_host": False})

    def seconds(framework: Framework, model: ModelSpec) -> float:
        return shard_on("h100-sxm", model, framework).time(timed, 1, 65536).layer

    further = seconds(waiting, mixture) - seconds(ahead, mixture)
    assert further == pytest.approx((30 + 23) * 3.0e-5)
    assert seconds(waiting, replace(mixture, experts=None)) == seconds(ahead, replace(mixture, experts=None))


def test_compute_hides_exchanges_that_overlap_with_it_while_no_launch_overlaps_with_the_device(
    step: Callable[..., Cost], mixture: ModelSpec
) -> None:
    """Where the host decides, a layer takes its launches; overlapped, it takes them and the device's time."""
    plain = framework_named("megatron-core")
    overlapped = plain.model_copy(update={"overlapped_experts": True})
    hidden, shown = (step(one, "dp16,ep16", model=mixture) for one in (overlapped, plain))
    assert shown.amount(EXPERT_EXCHANGES) > hidden.amount(EXPERT_EXCHANGES) == 0
    quick, free = (one.model_copy(update={"launch_seconds": 0.0}) for one in (overlapped, plain))
    on_device = step(free, "dp16,ep16", model=mixture).amount("layers")
    assert hidden.amount("layers") == pytest.approx(shown.amount("layers") + on_device)
    recorded = overlapped.model_copy(update={"cuda_graphs": True})
    assert step(recorded, "dp16,ep16", model=mixture).amount("layers") < 1.1 * on_device
    exposed, computed = (step(one, "dp16,ep16", model=mixture) for one in (quick, free))
    expected = max(computed.amount(EXPERT_EXCHANGES) - computed.amount("layers"), 0)
    assert exposed.amount(EXPERT_EXCHANGES) == pytest.approx(expected)
    assert exposed.amount("layers") == computed.amount("layers")


def test_biases_of_experts_move_what_their_kernels_read_and_write_in_training_alone(mixture: ModelSpec) -> None:
    """18 widths and 14 hidden sizes of 16 bits for each of 8 copies of a token."""
    plain = framework_named("megatron-core").model_copy(update={"launch_seconds": 0.0, "forward_launch_seconds": 0.0})
    fused = plain.model_copy(update={"fused_expert_biases": True})
    biased, few, many = replace(mixture, expert_bias=True), 4096, 8192

    def seconds(framework: Framework, timed: TimedPass, tokens: int) -> float:
        return shard_on("h100-sxm", biased, framework).time(timed, 1, tokens).layer

    further = [seconds(plain, TimedPass.TRAIN, n) - seconds(fused, TimedPass.TRAIN, n) for n in (few, many)]
    moved = 2 * 8 * few * (18 * 1024 + 14 * mixture.hidden_size)
    assert further == pytest.approx([moved / (3.35e12 * 0.93), 2 * moved / (3.35e12 * 0.93)], rel=0.01)
    assert seconds(plain, TimedPass.FORWARD, few) == seconds(fused, TimedPass.FORWARD, few)
    assert train(shard_on("h100-sxm", mixture, plain)) == train(shard_on("h100-sxm", mixture, fused))


@pytest.mark.parametrize("num_experts", [8, 64])
def test_the_device_waits_for_the_launches_of_the_biases_of_each_expert(mixture: ModelSpec, num_experts: int) -> None:
    """Two kernels forward and four backward for each expert; other launches of the layer overlap with the device."""
    assert mixture.experts is not None
    biased = replace(mixture, expert_bias=True, experts=replace(mixture.experts, num_experts=num_experts))
    plain, many = framework_named("megatron-core").model_copy(update={"counts_on_host": False}), 262144
    free = plain.model_copy(update={"launch_seconds": 0.0})
    slow, quick = (train(shard_on("h100-sxm", biased, one), many) for one in (plain, free))
    assert slow - quick == pytest.approx(6 * num_experts * 6.0e-5)
    slow, quick = (
        train(shard_on("h100-sxm", biased, one.model_copy(update={"cuda_graphs": True})), many) for one in (plain, free)
    )
    assert slow == quick


def test_a_framework_that_stores_scores_keeps_them_and_one_that_states_its_logits_has_as_many_bytes(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], fixed: Workload
) -> None:
    """4 rows of 128 tokens: 5 bytes for each of 32 heads and pair of tokens, in place of 4 bytes for each token."""
    asked, plain = query("actor_train", "dp8", 4), framework_named("runtime-cuda")

    def kept(framework: Framework, name: str) -> float:
        return AnalyticModel(a100s(1), fixed, "bf16", framework=framework).memory(asked).transient.amount(name)

    stored = plain.model_copy(update={"flash_attention": False})
    further = 4 * 128 * 32 * 32 * (5 * 128 - 4)
    assert kept(stored, "activations") - kept(plain, "activations") == pytest.approx(further)
    stated = plain.model_copy(update={"logit_bytes": 8})
    assert kept(stated, "logits") == 8 * 4 * 128 * 32000
