"""Stages that read responses while they are generated."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.compute import AnalyticShard
from meshwright.cost_models.micro_batches import Chunks, all_chunks, last_chunks, streaming_passes
from meshwright.cost_models.pipeline import MicroBatches
from meshwright.cost_models.protocol import StageQuery
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.errors import BadInput
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.table import TimedPass
from meshwright.profiles.workload import Workload


@pytest.fixture
def model(a100s: Callable[[int], Cluster], long_tail: Workload) -> AnalyticModel:
    return AnalyticModel(a100s(1), long_tail, "bf16")


@pytest.mark.parametrize("chunk", [1, 7, 64, 512, 4096])
def test_chunks_hold_every_token_once(long_tail: Workload, chunk: int) -> None:
    """But for the mean width of the last ones, which is rounded."""
    chunks = all_chunks(long_tail, 64, chunk)
    tokens = sum(number * width for number, width, _ in chunks)
    assert tokens == pytest.approx(sum(long_tail.response_lengths.stratified_sample(64)), abs=32)


def test_fixed_lengths_are_cut_by_hand(fixed: Workload) -> None:
    """64 rows of 28 tokens behind prompts of 100: three chunks of 8 and a rest of 4; the rests are the last."""
    assert all_chunks(fixed, 64, 8) == ((192, 8, 100 + 8), (64, 4, 100 + 24))
    assert last_chunks(fixed, 64, 8) == ((64, 4, 124),)


def test_passes_fill_micro_batches_and_know_what_is_cached() -> None:
    prompts = (MicroBatches(8, 8, 100),)
    passes = streaming_passes(prompts, (Chunks(192, 8, 108), Chunks(60, 4, 124)), 8)
    assert passes.batches == (*prompts, (24, 8, 8), (8, 8, 4))
    assert passes.contexts == {100: 0, 8: 108, 4: 124}


def test_chunks_as_wide_as_a_prompt_share_its_mean_context() -> None:
    passes = streaming_passes((MicroBatches(8, 8, 100),), (Chunks(192, 100, 108),), 8)
    assert passes.contexts == {100: 108 * 24 / 32}


def test_a_chunk_is_a_prefill_behind_cached_tokens_that_scores_every_token(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], llama: ModelSpec, fixed: Workload
) -> None:
    """The tail of 64 rows of 28 tokens in chunks of 16: 8 passes of 8 rows, 12 tokens behind 116."""
    cluster = a100s(1)
    tail = AnalyticModel(cluster, fixed, "bf16").tail_seconds(query("ref_logprob", "tp1", 8, chunk_tokens=16))
    shard = AnalyticShard(llama, cluster.device, "bf16", efficiency_of("cuda", "a100-80gb"), 1.0)
    layers = 32 * shard.time(TimedPass.PREFILL, 8, 12, 116).layer
    assert tail == pytest.approx(8 * (layers + shard.time(TimedPass.FORWARD, 8, 12).ends), rel=1e-9)


@pytest.mark.parametrize("stage", PPO_GRAPH.streaming)
@pytest.mark.parametrize("layout", ["dp8", "tp2,dp4", "tp2,pp2,dp2"])
def test_little_is_left_after_the_last_token(
    model: AnalyticModel, query: Callable[..., StageQuery], layout: str, stage: str
) -> None:
    whole = model.seconds(query(stage, layout, 4)).total
    streamed = query(stage, layout, 4, chunk_tokens=128)
    assert 0 < model.tail_seconds(streamed) < 0.1 * whole < model.seconds(streamed).total


def test_a_stage_that_does_not_stream_has_all_of_its_seconds_left(
    model: AnalyticModel, query: Callable[..., StageQuery]
) -> None:
    for stage in ("actor_train", "ref_logprob", "actor_generate"):
        question = query(stage, "dp8", 4, slots=8)
        assert model.tail_seconds(question) == model.seconds(question).total


def test_smaller_chunks_cost_more_and_leave_less(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], fixed: Workload
) -> None:
    model = AnalyticModel(a100s(1), fixed, "bf16")
    calls = [query("ref_logprob", "tp1", 64, chunk_tokens=chunk) for chunk in (1, 2, 4, 7, 14, 28)]
    seconds, tails = [model.seconds(c).total for c in calls], [model.tail_seconds(c) for c in calls]
    assert all(small > large for small, large in pairwise(seconds))
    assert all(small < 1.01 * large for small, large in pairwise(tails))
    assert tails[-1] > 2 * tails[0]
    assert all(tail < whole for tail, whole in zip(tails, seconds, strict=True))


@pytest.mark.parametrize("layout", ["dp8", "tp4,dp2", "pp4,dp2"])
def test_terms_of_a_stage_that_streams_are_positive(
    model: AnalyticModel, query: Callable[..., StageQuery], layout: str
) -> None:
    cost = model.seconds(query("reward_score", layout, 4, chunk_tokens=100))
    assert all(term.amount > 0 for term in cost.terms)


@pytest.mark.parametrize("stage", ["actor_logprob", "actor_train", "critic_train"])
def test_a_stage_that_cannot_stream_is_refused(
    model: AnalyticModel, query: Callable[..., StageQuery], stage: str
) -> None:
    with pytest.raises(BadInput, match=f"{stage}: chunk_tokens=64, and it does not read what is being generated; use"):
        model.seconds(query(stage, "dp8", 4, chunk_tokens=64))
