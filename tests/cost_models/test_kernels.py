"""The laws of single kernels at the ends where one resource decides."""

import pytest

from meshwright.cost_models.kernels import Heads, Kernels, precision_named
from meshwright.profiles.efficiency import Efficiency, efficiency_of
from meshwright.profiles.hardware import device_named
from meshwright.profiles.model_parts.hf_config import SlidingWindow

DEVICES = ("a100-80gb", "h100-sxm", "h200")
HEADS = Heads(32, 8, 128)


def kernels(name: str) -> tuple[Kernels, Efficiency, float, float]:
    """Kernels of a device, its efficiency, its peak and its bandwidth."""
    device, _, _ = device_named(name)
    efficiency = efficiency_of(device.kind, name)
    peak = device.flops_per_second["bf16"]
    made = Kernels(device, efficiency, flops_per_second=peak, weight_bytes=2, size=2)
    return made, efficiency, peak, device.memory_bytes_per_second


@pytest.mark.parametrize("name", DEVICES)
def test_a_large_product_is_bound_by_its_flops(name: str) -> None:
    made, _, peak, _ = kernels(name)
    share = 2 * 8192**3 / peak / made.gemm(8192, 8192, 8192)
    assert 0.7 < share < 0.95


@pytest.mark.parametrize("name", DEVICES)
def test_a_product_with_one_row_reads_its_weights(name: str) -> None:
    made, efficiency, _, bandwidth = kernels(name)
    read = 2 * 8192 * 8192 / (bandwidth * efficiency.gemm.bytes)
    assert read < made.gemm(1, 8192, 8192) - efficiency.kernel_seconds < 1.5 * read


@pytest.mark.parametrize("name", DEVICES)
def test_rows_within_a_tile_cost_the_same_and_more_rows_never_less(name: str) -> None:
    made, _, _, _ = kernels(name)
    times = [made.gemm(rows, 4096, 4096) for rows in (1, 8, 64, 65, 128, 512, 4096)]
    assert times == sorted(times)
    assert times[1] == pytest.approx(times[0], rel=0.02)


@pytest.mark.parametrize("name", DEVICES)
def test_products_that_follow_each_other_take_what_they_take_alone(name: str) -> None:
    made, _, _, _ = kernels(name)
    shapes = ((4096, 6144), (128, 4096), (11008, 64))
    together = made.products(shapes)
    for rows in (0.3, 1, 17.5, 64, 64.1, 700, 20000, 1):
        assert together(rows) == pytest.approx(sum(made.gemm(rows, *shape) for shape in shapes), rel=1e-12)


@pytest.mark.parametrize("name", DEVICES)
def test_a_long_cache_is_read_at_the_bandwidth_of_memory(name: str) -> None:
    made, efficiency, _, bandwidth = kernels(name)
    read = 2 * 64 * 16384 * 8 * 128 * 2 / (bandwidth * efficiency.decoding.bytes)
    assert made.attention(64, 1, 16383, HEADS, cache_bytes=2) == pytest.approx(read, rel=0.1)


@pytest.mark.parametrize("name", DEVICES)
def test_one_short_cache_leaves_processors_idle(name: str) -> None:
    made, efficiency, _, bandwidth = kernels(name)
    read = 2 * 1024 * 8 * 128 * 2 / (bandwidth * efficiency.decoding.bytes)
    assert made.attention(1, 1, 1023, HEADS, cache_bytes=2) - efficiency.decoding.seconds > 1.5 * read


def test_a_cache_that_is_not_spread_is_read_by_one_processor_for_each_key_head() -> None:
    made, efficiency, _, bandwidth = kernels("a100-80gb")
    assert efficiency.decoding.group == 2
    read = 2 * 8192 * 128 * 2 / (bandwidth * efficiency.decoding.bytes)
    alone, spread = (made.attention(1, 1, 8191, Heads(queries, 1, 128), cache_bytes=2) for queries in (1, 2))
    filling = efficiency.decoding.saturation * device_named("a100-80gb")[0].num_processors
    assert alone - efficiency.decoding.seconds == pytest.approx(filling * read, rel=0.01)
    assert spread < alone / 5
    assert made.attention(8, 1, 8191, Heads(1, 1, 128), cache_bytes=2) == pytest.approx(alone, rel=0.01)


def test_joining_the_blocks_of_a_row_begins_with_the_second() -> None:
    made, efficiency, _, _ = kernels("a100-80gb")
    block = int(efficiency.decoding.block)
    one, two = (made.attention(512, 1, context, Heads(8, 1, 128), cache_bytes=2) for context in (block - 1, block))
    assert two - one == pytest.approx(efficiency.decoding.join_seconds, rel=0.1)


@pytest.mark.parametrize("name", DEVICES)
def test_attention_grows_with_the_square_of_the_prompt(name: str) -> None:
    made, _, _, _ = kernels(name)
    short, long = (made.attention(1, tokens, 0, HEADS, cache_bytes=2) for tokens in (16384, 32768))
    assert long / short == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize("name", DEVICES)
def test_attention_to_a_window_grows_with_the_prompt_and_reads_no_more_of_a_cache(name: str) -> None:
    made, window = kernels(name)[0], SlidingWindow(num_tokens=1024)

    def seconds(tokens: float, context: float, window: SlidingWindow | None = window) -> float:
        return made.attention(8, tokens, context, HEADS._replace(window=window), cache_bytes=2)

    assert seconds(32768, 0) / seconds(16384, 0) == pytest.approx(2, rel=0.05)
    assert seconds(16384, 0) < seconds(16384, 0, None) / 4
    assert seconds(512, 0) == seconds(512, 0, None)
    assert seconds(1, 500) == seconds(1, 500, None)
    assert seconds(1, 60000) == seconds(1, 1023, None)


@pytest.mark.parametrize("name", DEVICES)
def test_a_grouped_product_of_few_rows_reads_each_weight_once(name: str) -> None:
    made, efficiency, _, bandwidth = kernels(name)
    read = 2 * 64 * 4096 * 2048 / (bandwidth * efficiency.grouped.bytes)
    assert read < made.grouped(64, 64, 4096, 2048) < 1.6 * read


@pytest.mark.parametrize("name", DEVICES)
def test_a_grouped_product_of_many_rows_is_bound_by_its_flops(name: str) -> None:
    made, efficiency, peak, _ = kernels(name)
    share = 2 * 2**17 * 4096 * 2048 / peak / made.grouped(2**17, 64, 4096, 2048)
    assert 0.7 * efficiency.grouped.flops < share < efficiency.grouped.flops


@pytest.mark.parametrize("name", DEVICES)
def test_rows_in_more_groups_or_more_rows_are_never_quicker(name: str) -> None:
    made, _, _, _ = kernels(name)
    for law in (made.grouped, made.grouped_gradient):
        by_groups = [law(4096, groups, 2048, 1536) for groups in (1, 2, 8, 64, 100.5, 128)]
        by_rows = [law(rows, 64, 2048, 1536) for rows in (64, 65, 100.5, 4096, 2**17)]
        assert by_groups == sorted(by_groups)
        assert by_rows == sorted(by_rows)


def made_in(name: str, precision: str) -> Kernels:
    device, _, _ = device_named(name)
    named = precision_named(precision, device)
    return Kernels(
        device,
        efficiency_of(device.kind, name),
        flops_per_second=device.flops_per_second[named.peak],
        weight_bytes=named.weight_bytes,
        size=named.size,
        block_scaled=named.block_scaled,
        widens=named.widens,
    )


def test_inputs_of_products_scaled_in_blocks_are_rounded_before_and_their_tiles_take_longer() -> None:
    blocks, whole = made_in("h200", "fp8-block"), made_in("h200", "fp8")
    efficiency = efficiency_of("cuda", "h200")
    assert efficiency.block_scaled is not None
    rounded = efficiency.block_scaled.seconds + blocks.elementwise(3 * 4096)
    assert rounded < blocks.gemm(1, 4096, 4096) - whole.gemm(1, 4096, 4096) < 1.3 * rounded
    flops = efficiency.block_scaled.flops
    assert whole.gemm(16384, 8192, 8192) / blocks.gemm(16384, 8192, 8192) == pytest.approx(flops, rel=0.05)
    shapes = ((4096, 6144), (2048, 4096))
    assert blocks.products(shapes)(48) == pytest.approx(sum(blocks.gemm(48, *shape) for shape in shapes))
    assert blocks.grouped(64, 64, 4096, 2048) == whole.grouped(64, 64, 4096, 2048)


def test_widened_weights_are_read_in_a_fraction_of_the_time_of_those_in_16_bits() -> None:
    four, sixteen = (made_in("h200", name).grouped(64, 64, 7168, 512) for name in ("w4a16", "bf16"))
    assert 0.25 < four / sixteen < 0.5
    many = [made_in("h200", name).grouped(2**17, 64, 7168, 512) for name in ("w4a16", "bf16")]
    assert many[0] == pytest.approx(many[1], rel=0.1)


def test_experts_in_4_bits_start_sooner_where_they_are_multiplied_as_such() -> None:
    starts = {name: made_in("b200", name).experts_start for name in ("bf16", "fp8", "fp4", "w4a16")}
    assert starts["fp4"] < starts["bf16"] == starts["fp8"] == starts["w4a16"]
