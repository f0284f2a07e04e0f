"""Formats have their bytes, and a format that is not known or that a device has no peak for is refused; 8-bit floats
gain where they are multiplied as they are."""

from collections.abc import Callable

import pytest

from meshwright.cost_models.compute import AnalyticShard
from meshwright.cost_models.kernels import PRECISIONS, element_bytes, precision_named
from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import framework_named
from meshwright.profiles.hardware import Cluster, Device, device_named, local_cluster
from meshwright.profiles.model_parts.fp8_weights import linears_of
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.table import TimedPass


def test_models_are_trained_in_two_bytes_or_four() -> None:
    assert (element_bytes("bf16"), element_bytes("fp32")) == (2, 4)
    for name in ("fp8", "fp4", "fp16"):
        with pytest.raises(BadInput, match=f"precision='{name}' is not known; use fp32 or bf16"):
            element_bytes(name)


def test_a_narrower_format_never_has_more_bytes() -> None:
    fp32, bf16, fp8, fp4 = (PRECISIONS[name] for name in ("fp32", "bf16", "fp8", "fp4"))
    for wide, narrow in ((fp32, bf16), (bf16, fp8), (fp8, fp4)):
        assert narrow.weight_bytes < wide.weight_bytes
        assert (narrow.size, narrow.cache_bytes) <= (wide.size, wide.cache_bytes)
    assert fp4.weight_bytes == 0.5 + 1 / 16  # a scale of one byte for each 16 weights


def test_a_format_is_one_that_the_device_has_a_peak_for(a100s: Callable[[int], Cluster]) -> None:
    device = a100s(1).device
    assert precision_named("bf16", device) == PRECISIONS["bf16"]
    with pytest.raises(BadInput, match="precision='int8' is not known; use fp32 or bf16 or fp8 or fp4"):
        precision_named("int8", device)
    with pytest.raises(BadInput, match=r"has no peak for bf16; give flops_per_second\.bf16"):
        precision_named("bf16", device.model_copy(update={"flops_per_second": {"fp32": 1e12}}))


def shards(model: ModelSpec, device: Device, precision: str, framework: str) -> tuple[AnalyticShard, AnalyticShard]:
    """Of a generator in 8-bit floats, and of one in this precision."""
    efficiency, runs = efficiency_of(device.kind, device.name), framework_named(framework)
    one, other = (
        AnalyticShard(model, device, precision, efficiency, 1.0, framework=runs, is_quantised=quantised)
        for quantised in (True, False)
    )
    return one, other


@pytest.mark.parametrize("device", ["h100-sxm", "h200", "b200", "l40s"])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_decode_step_is_never_slower_where_rounding_is_part_of_other_kernels(
    llama: ModelSpec, device: str, tp: int
) -> None:
    quantised, whole = shards(llama.shard(tp), device_named(device)[0], "bf16", "vllm")
    for rows in (1, 3, 16, 64, 256, 1024):
        for timed_pass, tokens, context in ((TimedPass.DECODE, 1, 500), (TimedPass.PREFILL, 300, 0)):
            mine, theirs = (shard.time(timed_pass, rows, tokens, context) for shard in (quantised, whole))
            assert mine.layer <= theirs.layer
            assert mine.ends == theirs.ends


def test_our_decode_step_gains_where_reading_weights_takes_longer_than_starting_what_rounds_tokens(
    llama: ModelSpec,
) -> None:
    device = device_named("h100-sxm")[0]
    for tp, gains in ((1, True), (8, False)):
        quantised, whole = (
            s.time(TimedPass.DECODE, 16, 1, 500) for s in shards(llama.shard(tp), device, "bf16", "runtime-graph")
        )
        assert (quantised.layer < whole.layer) is gains


def test_a_cpu_is_slower_by_what_it_casts_up_however_few_the_tokens(llama: ModelSpec) -> None:
    device = local_cluster(1).device
    quantised, whole = shards(llama, device, "fp32", "runtime")
    moved = linears_of(llama).num_weights * (1 + 4) / device.memory_bytes_per_second
    for rows in (1, 8):
        mine, theirs = (shard.time(TimedPass.DECODE, rows, 1, 100).layer for shard in (quantised, whole))
        assert mine - theirs > moved


def test_weights_of_4_bits_that_are_widened_are_read_quicker_and_computed_no_faster(
    llama: ModelSpec, a100s: Callable[[int], Cluster]
) -> None:
    device, efficiency = a100s(1).device, efficiency_of("cuda", "a100-80gb")
    framework = framework_named("vllm")
    plain, narrow = (
        AnalyticShard(llama, device, precision, efficiency, 1.0, framework=framework) for precision in ("bf16", "w4a16")
    )
    one, many = ((TimedPass.DECODE, 1, 1, 100), (TimedPass.FORWARD, 1, 8192, 0))
    assert narrow.time(*one).layer < 0.9 * plain.time(*one).layer
    assert narrow.time(*many).layer == pytest.approx(plain.time(*many).layer, rel=0.1)
