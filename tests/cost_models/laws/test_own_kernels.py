"""Laws of this project's kernels on a GPU, and what NVIDIA H200s measured of them (2026-11-26 and 27)."""

from collections.abc import Callable
from importlib.resources import as_file, files
from typing import Any

import pytest

from meshwright.cost_models.compute import AnalyticShard
from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.frameworks import framework_named, own_framework
from meshwright.profiles.hardware import Cluster, device_named
from meshwright.profiles.model_shape import ModelSpec, model_from_config
from meshwright.profiles.table import Measurement, TimedPass, read_table

_QWEN: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936, "num_key_value_heads": 2}
_LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "num_key_value_heads": 8}
DECODED = {
    "qwen2.5-0.5b": (1.52e-3, _QWEN, (896, 4864, 24, 14)),
    "qwen2.5-1.5b": (2.52e-3, _QWEN, (1536, 8960, 28, 12)),
    "llama-3.1-8b": (7.56e-3, _LLAMA, (4096, 14336, 32, 32)),
}
"""Seconds of a round of 64 rows of 1,000 tokens (benchmarks/accelerator/h200_2026-11-26.md), and what a config says."""


@pytest.mark.parametrize("timed_pass", [TimedPass.FORWARD, TimedPass.TRAIN, TimedPass.PREFILL, TimedPass.DECODE])
def test_kernels_of_our_own_never_take_longer(
    timed_pass: TimedPass, llama: ModelSpec, a100s: Callable[[int], Cluster]
) -> None:
    device, efficiency = a100s(1).device, efficiency_of("cuda", "a100-80gb")
    plain, own = (
        AnalyticShard(llama, device, "bf16", efficiency, 1.0, framework=framework_named(name)).time(timed_pass, 64, 100)
        for name in ("runtime", "runtime-eager")
    )
    assert own.layer == plain.layer
    assert own.ends <= plain.ends
    assert own.ends < plain.ends or timed_pass in (TimedPass.PREFILL, TimedPass.DECODE)  # of 64 rows the host is slower


def test_a_gpu_runs_our_own_kernels_where_no_framework_is_named(
    llama: ModelSpec, a100s: Callable[[int], Cluster]
) -> None:
    device, efficiency = a100s(1).device, efficiency_of("cuda", "a100-80gb")
    unnamed = AnalyticShard(llama, device, "bf16", efficiency, 1.0)
    named = AnalyticShard(llama, device, "bf16", efficiency, 1.0, framework=own_framework("cuda"))
    assert unnamed.time(TimedPass.TRAIN, 8, 512) == named.time(TimedPass.TRAIN, 8, 512)


@pytest.mark.parametrize(("timed_pass", "measured"), [(TimedPass.FORWARD, 33e-3), (TimedPass.TRAIN, 72e-3)])
def test_a_whole_pass_of_few_tokens_takes_what_its_host_needed_within_a_tenth(
    timed_pass: TimedPass, measured: float
) -> None:
    """Of Qwen2.5-0.5B on one H200 (docs/on_a_gpu.md)."""
    model = decoded("qwen2.5-0.5b")
    layer, ends, _ = shard_on_h200(model, "runtime-cuda").time(timed_pass, 4, 540)
    assert model.num_layers * layer + ends == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("timed_pass", [TimedPass.FORWARD, TimedPass.TRAIN])
@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "llama-3.1-8b"])
def test_passes_that_wait_for_the_host_take_what_an_h200_measured_within_a_third_on_average(
    timed_pass: TimedPass, model: str
) -> None:
    """The host of one machine differs from another's, and within a run, so that single passes are further off."""
    errors = [
        by_equation(one) / seconds_of(one) - 1
        for one in measured_on_h200(model)
        if one.point.timed_pass is timed_pass and one.point.rows * one.point.tokens < 2300
    ]
    assert len(errors) >= 16
    assert sum(map(abs, errors)) / len(errors) < 1 / 3


@pytest.mark.parametrize("timed_pass", [TimedPass.FORWARD, TimedPass.TRAIN])
def test_passes_with_a_vocabulary_take_what_an_h200_measured_within_a_sixth_where_the_host_is_ahead(
    timed_pass: TimedPass,
) -> None:
    errors = [
        by_equation(one) / seconds_of(one) - 1
        for one in measured_on_h200("qwen2.5-0.5b")
        if one.point.timed_pass is timed_pass and not one.point.shape.scalar_head and one.point.rows >= 64
    ]
    assert len(errors) == 12
    assert max(map(abs, errors)) < 1 / 6


@pytest.mark.parametrize("timed_pass", [TimedPass.FORWARD, TimedPass.TRAIN])
def test_passes_of_an_8b_take_what_an_h200_measured_within_a_tenth_where_the_host_is_ahead(
    timed_pass: TimedPass,
) -> None:
    errors = [
        by_equation(one) / seconds_of(one) - 1
        for one in measured_on_h200("llama-3.1-8b")
        if one.point.timed_pass is timed_pass and one.point.rows * one.point.tokens >= 2**12
    ]
    assert len(errors) >= 6
    assert max(map(abs, errors)) < 1 / 10


def test_decode_steps_of_eight_layers_of_an_8b_take_what_an_h200_measured_within_a_tenth() -> None:
    errors = [
        by_equation(one) / seconds_of(one) - 1
        for one in measured_on_h200("llama-3.1-8b")
        if one.point.timed_pass is TimedPass.DECODE and one.point.num_layers == 8
    ]
    assert len(errors) == 12
    assert max(map(abs, errors)) < 1 / 10


@pytest.mark.parametrize("name", DECODED)
def test_a_recorded_round_takes_what_an_h200_measured_within_a_tenth(name: str) -> None:
    model = decoded(name)
    layer, ends, _ = shard_on_h200(model, "runtime-graph").time(TimedPass.DECODE, 64, 1, 1000)
    assert model.num_layers * layer + ends == pytest.approx(DECODED[name][0], rel=0.1)


def decoded(name: str) -> ModelSpec:
    _, family, (hidden, ffn, layers, heads) = DECODED[name]
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads}
    config = {**family, **sizes, "max_position_embeddings": 2048, "tie_word_embeddings": family is _QWEN}
    return model_from_config(config, name=name)


def measured_on_h200(model: str) -> tuple[Measurement, ...]:
    with as_file(files("meshwright.profiles") / "data" / "h200" / f"{model}.json") as path:
        return tuple(one for one in read_table(path).measurements if one.status == "ok")


def seconds_of(one: Measurement) -> float:
    assert one.seconds is not None
    return one.seconds


def by_equation(one: Measurement) -> float:
    point = one.point
    framework = "runtime-cuda" if point.timed_pass in (TimedPass.FORWARD, TimedPass.TRAIN) else "runtime-graph"
    shard = shard_on_h200(point.shape.model(num_layers=1, max_positions=4096), framework)
    layer, ends, _ = shard.time(point.timed_pass, point.rows, point.tokens, point.context)
    return point.num_layers * layer + ends


def shard_on_h200(model: ModelSpec, framework: str) -> AnalyticShard:
    device, _, _ = device_named("h200")
    efficiency = efficiency_of("cuda", "h200")
    return AnalyticShard(model, device, "bf16", efficiency, 1.0, framework=framework_named(framework))
