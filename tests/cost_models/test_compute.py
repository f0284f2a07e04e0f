from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.cost_models.compute import AnalyticShard
from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.frameworks import framework_named
from meshwright.profiles.hardware import Cluster, Device
from meshwright.profiles.model_parts.hf_config import SlidingWindow
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.table import TimedPass


@pytest.fixture
def shard(llama: ModelSpec, a100s: Callable[[int], Cluster]) -> Callable[..., AnalyticShard]:
    def of(tp: int = 1, whole_share: float = 1.0, **device: object) -> AnalyticShard:
        changed = a100s(1).device.model_copy(update=device)
        return AnalyticShard(llama.shard(tp), changed, "bf16", efficiency_of("cuda", "a100-80gb"), whole_share)

    return of


BODIES = [
    (TimedPass.FORWARD, 4, 1024, 0),
    (TimedPass.TRAIN, 4, 1024, 0),
    (TimedPass.PREFILL, 4, 512, 0),
    (TimedPass.DECODE, 64, 1, 900),
    (TimedPass.OPTIMIZER, 0, 0, 0),
]


@pytest.mark.parametrize("timed_pass", BODIES, ids=lambda timed_pass: timed_pass[0])
@pytest.mark.parametrize("fact", ["memory_bytes_per_second", "flops_per_second", "launch_seconds"])
def test_a_better_device_is_never_slower(
    shard: Callable[..., AnalyticShard],
    a100s: Callable[[int], Cluster],
    timed_pass: tuple[TimedPass, int, int, int],
    fact: str,
) -> None:
    device: Device = a100s(1).device
    better: object = getattr(device, fact)
    better = {k: 2 * v for k, v in better.items()} if isinstance(better, dict) else better * 2
    if fact == "launch_seconds":
        better = device.launch_seconds / 2
    before, after = shard().time(*timed_pass), shard(**{fact: better}).time(*timed_pass)
    assert after.layer <= before.layer
    assert after.ends <= before.ends


@pytest.mark.parametrize("timed_pass", BODIES[:4], ids=lambda timed_pass: timed_pass[0])
def test_passes_together_take_the_sum_of_what_each_takes(
    shard: Callable[..., AnalyticShard], timed_pass: tuple[TimedPass, int, int, int]
) -> None:
    name, rows, tokens, context = timed_pass
    passes = [(3, rows, tokens, context), (0.5, rows / 3, tokens, context), (2, rows, tokens, context + 7)]
    total, each = shard().total(name, passes), [(number, shard().time(name, *at)) for number, *at in passes]
    assert total.layer == pytest.approx(sum(number * time.layer for number, time in each), rel=1e-12)
    assert total.ends == pytest.approx(sum(number * time.ends for number, time in each), rel=1e-12)


def test_a_large_forward_pass_is_bound_by_its_flops(shard: Callable[..., AnalyticShard], llama: ModelSpec) -> None:
    tokens = 16 * 2048
    at_peak = 2 * tokens * llama.layer_params / 312e12
    assert 0.5 < at_peak / shard().time(TimedPass.FORWARD, 16, 2048).layer < 0.85


def test_attention_grows_with_the_square_of_the_prompt(shard: Callable[..., AnalyticShard]) -> None:
    short, long = shard().attention(1, 16384), shard().attention(1, 32768)
    assert long / short == pytest.approx(4, rel=0.05)


def test_training_costs_about_three_forward_passes(shard: Callable[..., AnalyticShard]) -> None:
    forward, train = shard().time(TimedPass.FORWARD, 4, 1024), shard().time(TimedPass.TRAIN, 4, 1024)
    assert 3 <= train.layer / forward.layer < 3.5


def test_a_shard_takes_less_and_sequence_parallelism_less_again(shard: Callable[..., AnalyticShard]) -> None:
    whole = shard().time(TimedPass.FORWARD, 4, 1024).layer
    half = shard(2).time(TimedPass.FORWARD, 4, 1024).layer
    sequence = shard(2, 0.5).time(TimedPass.FORWARD, 4, 1024).layer
    assert whole / 2 < half < whole
    assert sequence < half


def test_a_scalar_head_costs_next_to_nothing(llama: ModelSpec, a100s: Callable[[int], Cluster]) -> None:
    def ends(scalar_head: bool) -> float:
        model = llama.__class__(**{**llama.__dict__, "scalar_head": scalar_head})
        shard = AnalyticShard(model, a100s(1).device, "bf16", efficiency_of("cuda", "a100-80gb"), 1.0)
        return shard.time(TimedPass.FORWARD, 64, 1024).ends  # so many that the host is ahead

    assert ends(True) < ends(False) / 10


def test_scores_that_are_stored_are_written_and_read_once_where_computing_takes_no_time(
    llama: ModelSpec, a100s: Callable[[int], Cluster]
) -> None:
    device, efficiency = a100s(1).device, efficiency_of("cuda", "a100-80gb")
    quick = device.model_copy(update={"flops_per_second": {"bf16": 1e30}})
    stored = AnalyticShard(llama, quick, "bf16", efficiency, 1.0, framework=framework_named("megatron-2021"))
    rows, tokens = 4, 2048
    num_scores, starts = rows * 32 * tokens**2, 2 * efficiency.kernel_seconds
    bandwidth = device.memory_bytes_per_second * efficiency.elementwise_bytes
    assert stored.attention(rows, tokens) == pytest.approx(starts + 13 * num_scores / bandwidth, rel=1e-6)


def test_a_layer_is_the_mean_of_those_with_a_sliding_window_and_those_without(
    llama: ModelSpec, a100s: Callable[[int], Cluster]
) -> None:
    def of(window: SlidingWindow | None) -> AnalyticShard:
        at_once = a100s(1).device.model_copy(update={"launch_seconds": 1e-12})
        return AnalyticShard(replace(llama, window=window), at_once, "bf16", efficiency_of("cuda", "a100-80gb"), 1.0)

    plain, half, all_layers = map(of, (None, SlidingWindow(num_tokens=128, every=2), SlidingWindow(num_tokens=128)))
    for timed_pass, rows, tokens, context in BODIES:
        ends = [shard.time(timed_pass, rows, tokens, context).layer for shard in (plain, all_layers)]
        assert half.time(timed_pass, rows, tokens, context).layer == pytest.approx(sum(ends) / 2)
        assert ends[1] <= ends[0]
    assert all_layers.time(TimedPass.DECODE, 64, 1, 8000).layer == all_layers.time(TimedPass.DECODE, 64, 1, 127).layer


def test_gradients_of_attention_are_slower_by_what_was_measured_of_them(
    llama: ModelSpec, a100s: Callable[[int], Cluster]
) -> None:
    """Of a whole pass five of seven products are gradients."""
    known = efficiency_of("cuda", "h200")

    def of(gradients: float) -> float:
        slower = known.model_copy(update={"attention": known.attention.model_copy(update={"gradients": gradients})})
        return AnalyticShard(llama, a100s(1).device, "bf16", slower, 1.0).attention(4, 4096, trains=True)

    forward = AnalyticShard(llama, a100s(1).device, "bf16", known, 1.0).attention(4, 4096)
    assert of(1.0) == pytest.approx(3.5 * forward)
    assert of(0.5) == pytest.approx(6 * forward)
    assert efficiency_of("cuda", "h200").attention.gradients == pytest.approx(475 / 586, rel=0.01)
