"""An inference engine in its steady state, and with batches that start together."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.fidelity.hardware import cluster_of
from benchmarks.fidelity.inference import serving_point
from benchmarks.fidelity.serving import MeasuredEngine, Serving
from meshwright.cost_models.compute import WeightFormats
from meshwright.cost_models.kernels import Kernels
from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.errors import BadInput
from meshwright.profiles.experts import Experts
from meshwright.profiles.frameworks import framework_named
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.harness import TimingResult, record_collective
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_parts.hf_config import SlidingWindow
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.table import Collective, Exchange

POINT = {
    "backend": "vllm",
    "backend_version": "",
    "model_path": "meta-llama/Llama-3.1-70B",
    "system": "h200_sxm",
    "precision": "fp8",
    "isl": "1024",
    "osl": "1024",
    "batch_size": "8",
    "tp_size": "8",
    "pp_size": "1",
}


@pytest.fixture
def serving(llama: ModelSpec, a100s: Callable[[int], Cluster]) -> Serving:
    return Serving(
        model=llama,
        layout=Layout(tp=2),
        cluster=a100s(1),
        precision="bf16",
        framework=framework_named("tensorrt-llm"),
        prompt_tokens=512,
        response_tokens=256,
    )


def test_more_rows_take_a_longer_round_and_draw_more_tokens_a_second(serving: Serving) -> None:
    seconds = [serving.round_seconds(rows).total for rows in (1, 8, 64, 256)]
    assert seconds == sorted(seconds)
    rates = [rows / s for rows, s in zip((1, 8, 64, 256), seconds, strict=True)]
    assert rates == sorted(rates)


def test_short_responses_pay_for_more_prompts(serving: Serving) -> None:
    short = replace(serving, response_tokens=64)
    assert short.round_seconds(64).total > serving.round_seconds(64).total


def test_the_cache_holds_what_memory_is_left(serving: Serving, llama: ModelSpec) -> None:
    weights, per_row = 2 * llama.num_params / 2, 2 * 32 * 4096 / 2 * 2 * (512 + 256)
    largest_pass = 2 * 8192 * (4 * 4096 + 2 * 4096 + 1.5 * 11008)
    assert serving.slots() == pytest.approx(0.9 * (80 * 2**30 - weights - largest_pass) / per_row, rel=0.01)
    assert replace(serving, layout=Layout(tp=4)).slots() > 2 * serving.slots()


def test_a_model_that_leaves_no_memory_is_refused_in_a_sentence(serving: Serving, llama: ModelSpec) -> None:
    huge = replace(serving, model=replace(llama, num_layers=1000))
    with pytest.raises(BadInput, match="leaves no memory for one sequence; use a larger tp or pp"):
        huge.slots()


def test_a_last_wave_of_one_reads_all_weights_for_it(serving: Serving) -> None:
    long = replace(serving, prompt_tokens=16, response_tokens=2048)
    slots = long.slots()
    assert long.offline_rate(slots + 1) < 0.9 * long.offline_rate(slots)
    assert long.offline_rate(100 * slots + 1) == pytest.approx(long.offline_rate(slots), rel=0.02)


def test_one_response_token_is_a_prefill(serving: Serving) -> None:
    first = replace(serving, response_tokens=1).batch_seconds(4)
    assert {term.name.split()[0] for term in first.terms} == {"prefill", "tensor-parallel", "logits", "scheduling"}
    assert serving.batch_seconds(4).total > first.total + 200 * serving.round_seconds(1).total / 2


def test_terms_are_positive_and_an_unknown_framework_is_refused(serving: Serving) -> None:
    assert all(term.amount > 0 for term in serving.round_seconds(16).terms)
    with pytest.raises(BadInput, match="framework 'vlm' is not known; did you mean 'vllm'"):
        framework_named("vlm")


def test_an_engine_that_was_measured_answers_by_what_was_measured(serving: Serving) -> None:
    """The same laws and no collectives change nothing; a slower head is met, and so is a quicker all-reduce."""
    device = serving.cluster.device
    efficiency = efficiency_of(device.kind, device.name)
    flops = device.flops_per_second["bf16"] * efficiency.sustained
    laws, slower = (Kernels(device, efficiency, flops_per_second=flops, weight_bytes=b, size=2) for b in (2, 4))
    alike = MeasuredEngine(kernels=laws, head_kernels=laws, collectives=())
    assert replace(serving, measured=alike).round_seconds(64) == serving.round_seconds(64)
    before, behind, ahead = (
        {term.name: term.amount for term in asked.round_seconds(64).terms}
        for asked in (
            serving,
            replace(serving, measured=replace(alike, head_kernels=slower)),
            replace(serving, measured=replace(alike, collectives=(_reduction(1e-9), _reduction(2e-9, 2**30)))),
        )
    )
    assert behind["decode layers"] == before["decode layers"]
    assert behind["decode embedding and head"] > before["decode embedding and head"]
    assert ahead["tensor-parallel collectives"] < before["tensor-parallel collectives"] / 100


def _reduction(seconds: float, num_bytes: int = 1) -> Collective:
    exchange = Exchange(operation="all_reduce", num_ranks=2, num_bytes=num_bytes)
    return record_collective(exchange, TimingResult(median_seconds=seconds, spread_seconds=0.0, repeats=1))


@pytest.mark.parametrize("precision", ["fp8", "fp4"])
def test_a_format_without_a_peak_is_refused(serving: Serving, precision: str) -> None:
    with pytest.raises(BadInput, match=f"has no peak for {precision}"):
        replace(serving, precision=precision).round_seconds(1)


def test_cached_prompts_cost_nothing(serving: Serving) -> None:
    every, none = serving.round_seconds(64), replace(serving, prompts_are_cached=True).round_seconds(64)
    assert {term.name for term in every.terms} > {term.name for term in none.terms}
    assert none.total == pytest.approx(
        sum(t.amount for t in every.terms if t.name.startswith(("decode", "sched"))), rel=0.3
    )


def test_embedding_and_head_stay_in_16_bits(serving: Serving, llama: ModelSpec) -> None:
    """A larger vocabulary takes the memory of 16 bits a weight whatever the format of the layers."""
    eight = replace(serving, cluster=cluster_of("H100", 8), precision="fp8")
    wide = replace(eight, model=replace(llama, vocab_size=llama.vocab_size + 2**18))
    further = 2 * 2 * 2**18 * llama.hidden_size / 2
    per_row = 32 * 4096 * (512 + 256)
    assert eight.slots() - wide.slots() == pytest.approx(0.9 * further / per_row, abs=1.5)


def test_a_host_that_prepares_the_next_round_meanwhile_takes_only_what_it_takes_longer(serving: Serving) -> None:
    slow = serving.framework.model_copy(update={"round_seconds": 1.0})
    meanwhile = slow.model_copy(update={"overlapped_host": True})
    after, beside = (replace(serving, framework=one).round_seconds(64).total for one in (slow, meanwhile))
    assert beside == pytest.approx(1.0)
    assert after > beside
    hidden = serving.framework.model_copy(update={"overlapped_host": True})
    assert "scheduling" not in {term.name for term in replace(serving, framework=hidden).round_seconds(64).terms}


def test_experts_in_fewer_bits_leave_more_memory_and_take_less_time(serving: Serving) -> None:
    experts = Experts(num_experts=32, experts_per_token=4, ffn_size=1024)
    sixteen = replace(serving, cluster=cluster_of("H100", 8), model=replace(serving.model, experts=experts))
    four = replace(sixteen, weight_formats=WeightFormats("bf16", "w4a16"))
    assert replace(sixteen, weight_formats=WeightFormats("bf16", "bf16")).slots() == sixteen.slots()
    saved = (2 - 0.5625) * 32 * 3 * 4096 * 1024 * 32 / 2
    per_row = 2 * 32 * 4096 * (512 + 256)
    assert four.slots() - sixteen.slots() == pytest.approx(0.9 * saved / per_row, abs=1.5)
    assert four.round_seconds(16).total < sixteen.round_seconds(16).total


def test_layers_with_a_window_keep_only_what_it_holds(serving: Serving) -> None:
    windowed = replace(serving, model=replace(serving.model, window=SlidingWindow(num_tokens=128, every=2)))
    every = 512 + 256
    assert windowed.slots() / serving.slots() == pytest.approx(every / (every / 2 + 128 / 2), rel=0.02)


@pytest.mark.parametrize(
    ("engine", "release", "hides"),
    [
        ("vllm", "0.12.0", False),
        ("vllm", "0.14.0", True),
        ("sglang", "0.5.9", True),
        ("trtllm", "1.1.0rc2", False),
        ("trtllm", "1.2.0rc6.post2", True),
        ("trtllm", "", False),
    ],
)
def test_a_release_tells_whether_its_host_is_hidden(engine: str, release: str, *, hides: bool) -> None:
    serving, _ = serving_point({**POINT, "backend": engine, "backend_version": release})
    assert serving.framework.overlapped_host == hides


@pytest.mark.parametrize(
    ("model", "precision", "system", "expected"),
    [
        ("deepseek-ai/DeepSeek-V3", "fp8", "h200_sxm", ("bf16", WeightFormats("fp8-block", "fp8"))),
        ("deepseek-ai/DeepSeek-V3", "fp4", "b200_sxm", ("bf16", WeightFormats("bf16", "fp4"))),
        ("openai/gpt-oss-120b", "fp8", "h200_sxm", ("bf16", WeightFormats("bf16", "w4a16"))),
        ("meta-llama/Llama-3.1-70B", "fp8", "h200_sxm", ("fp8", None)),
    ],
)
def test_a_checkpoint_tells_in_which_bits_its_weights_are(
    model: str, precision: str, system: str, expected: tuple[str, WeightFormats | None]
) -> None:
    serving, _ = serving_point({**POINT, "model_path": model, "precision": precision, "system": system})
    assert (serving.precision, serving.weight_formats) == expected
