from dataclasses import replace

import pytest

from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.observations import (
    collective_factor,
    compute_factor,
    extra_transfer_seconds,
    observe,
    observe_workload,
    timed_passes_of,
)
from meshwright.profiles.speculation import Speculation
from meshwright.profiles.table import TimedPass
from meshwright.profiles.trace import Span
from meshwright.profiles.workload import Workload

LAYOUTS = {"actor_generate": Layout(tp=2, dp=2), "ref_logprob": Layout(), "actor_train": Layout(dp=2)}
"""Of four ranks, generation uses all; a replica of it has two."""


def span(step: int, stage: str, rank: int, seconds: float, **facts: float) -> Span:
    return Span(
        step=step,
        instruction=stage,
        kind="stage",
        rank=rank,
        start_seconds=10.0 * step,
        end_seconds=10.0 * step + seconds,
        clock="measured",
        facts=facts,
    )


def trace(num_steps: int, scale: float = 1.0) -> list[Span]:
    """Step s: generation takes 1 + s seconds on its slowest rank. 32 sequences of 5 and 15 tokens."""
    return [
        item
        for step in range(num_steps)
        for item in (
            *(span(step, "actor_generate", rank, 1 + step - rank / 8, num_tokens=240 * scale) for rank in range(4)),
            span(step, "ref_logprob", 0, 0.5, num_tokens=32 * (5 + 15 * scale)),
            span(step, "actor_train", 0, 2.0),
            span(step, "actor_train", 1, 2.5),
        )
    ]


def test_a_stage_takes_what_its_slowest_replica_takes_in_the_median_step_after_the_first() -> None:
    seen = observe(trace(4), LAYOUTS, PPO_GRAPH, batch_size=32)
    assert seen.num_steps == 3
    assert seen.seconds == {"actor_generate": 3.0, "ref_logprob": 0.5, "actor_train": 2.5}
    assert seen.spread["actor_generate"] == pytest.approx(1.0 / 3.0)
    assert seen.spread["actor_train"] == 0.0


def test_tokens_are_counted_once_for_a_replica_whose_ranks_all_tell_them() -> None:
    seen = observe(trace(3), LAYOUTS, PPO_GRAPH, batch_size=32)
    assert (seen.response_tokens, seen.sequence_tokens) == (15.0, 20.0)


def test_a_trace_that_tells_no_tokens_leaves_the_workload_as_it_was(workload: Workload) -> None:
    silent = [replace(item, facts={}) for item in trace(3)]
    seen = observe(silent, LAYOUTS, PPO_GRAPH, batch_size=32)
    assert (seen.response_tokens, seen.sequence_tokens) == (None, None)
    assert observe_workload(workload, seen) == workload


def test_the_workload_that_was_met_has_the_drafts_of_the_trace(workload: Workload) -> None:
    """Calibration would otherwise take drafts that were not found for a slow engine."""
    stated = workload.model_copy(update={"speculation": Speculation(acceptance=(0.9, 0.9))})
    for accepted, met in ((30.0, (0.75, 0.9)), (0.0, (0.0, 0.9))):
        facts = {"num_row_rounds": 80.0, "num_drafted_0": 40.0, "num_accepted_0": accepted}
        drafted = [replace(item, facts={**item.facts, **facts}) for item in trace(3)]
        seen = observe(drafted, LAYOUTS, PPO_GRAPH, batch_size=32)
        assert observe_workload(stated, seen).speculation == Speculation(acceptance=met, drafted=0.5)
        assert observe_workload(workload, seen).speculation is None


def test_the_workload_that_was_met_has_the_means_of_the_trace(workload: Workload) -> None:
    found = observe_workload(workload, observe(trace(3, scale=2.0), LAYOUTS, PPO_GRAPH, batch_size=32))
    assert found.response_lengths.mean == pytest.approx(30.0)
    assert found.prompt_lengths.mean == pytest.approx(5.0)
    assert found.max_tokens == workload.max_tokens


def test_the_share_of_responses_that_were_cut_is_met_beside_their_mean(workload: Workload) -> None:
    """6 of 32 responses were cut at the longest length, 96 tokens, though the mean is 25: the others are short."""
    cut = [
        replace(item, facts={**item.facts, "num_truncated": 3.0}) if item.instruction == "actor_generate" else item
        for item in trace(3, scale=5 / 3)
    ]
    seen = observe(cut, LAYOUTS, PPO_GRAPH, batch_size=32)
    assert seen.truncated_share == 6 / 32
    found = observe_workload(workload, seen).response_lengths
    assert found.mean == pytest.approx(25.0)
    assert (found.maximum, found.probabilities[-1]) == (96, pytest.approx(6 / 32))
    none = observe_workload(workload, replace(seen, truncated_share=0.0)).response_lengths
    assert none.mean == pytest.approx(25.0)
    assert none.maximum < 96


def test_the_longest_response_is_met_where_none_was_cut(workload: Workload) -> None:
    """The longest of 32 responses has 60 tokens on average; the mean stays 15, and no length is cut off."""
    told = [
        replace(item, facts={**item.facts, "num_truncated": 0.0, "num_longest_tokens": 60.0 - item.rank})
        if item.instruction == "actor_generate"
        else item
        for item in trace(3)
    ]
    seen = observe(told, LAYOUTS, PPO_GRAPH, batch_size=32)
    assert seen.longest_tokens == 60.0
    found = observe_workload(workload, seen).response_lengths
    assert found.mean == pytest.approx(15.0)
    assert found.expected_maximum(32) == pytest.approx(60.0, rel=0.01)
    assert found.maximum > 60


def test_a_share_that_no_lengths_can_have_scales_them_all(workload: Workload) -> None:
    """Half of the responses at 96 tokens have a mean above 25."""
    seen = replace(observe(trace(3, scale=5 / 3), LAYOUTS, PPO_GRAPH, batch_size=32), truncated_share=0.5)
    assert observe_workload(workload, seen).response_lengths.mean == pytest.approx(25.0)


def test_a_step_that_lacks_a_span_does_not_count() -> None:
    assert observe(trace(4)[:-1], LAYOUTS, PPO_GRAPH, batch_size=32).num_steps == 2


@pytest.mark.parametrize("num_steps", [0, 1])
def test_the_first_step_alone_calibrates_nothing(num_steps: int) -> None:
    with pytest.raises(BadInput, match="no complete step after the first"):
        observe(trace(num_steps), LAYOUTS, PPO_GRAPH, batch_size=32)


@pytest.mark.parametrize("clock", ["simulated", "rehearsed"])
def test_only_a_measured_trace_counts(clock: str) -> None:
    mixed = [*trace(3), replace(trace(1)[0], clock=clock)]
    with pytest.raises(BadInput, match=f"the trace is {clock} and not measured; give the directory"):
        observe(mixed, LAYOUTS, PPO_GRAPH, batch_size=32)


def test_a_stage_that_took_no_time_is_refused() -> None:
    frozen = [replace(item, end_seconds=item.start_seconds) for item in trace(3)]
    with pytest.raises(BadInput, match="took no time"):
        observe(frozen, LAYOUTS, PPO_GRAPH, batch_size=32)


def test_a_factor_multiplies_what_is_computed_and_nothing_else() -> None:
    assert compute_factor(measured=5.0, predicted=5.0, doubled=9.0) == 1.0
    assert compute_factor(measured=9.0, predicted=5.0, doubled=9.0) == 2.0
    assert compute_factor(measured=3.0, predicted=5.0, doubled=9.0) == 0.5
    assert compute_factor(measured=0.5, predicted=5.0, doubled=9.0) <= 0
    assert compute_factor(measured=5.0, predicted=4.0, doubled=4.0) == 0


def test_a_stage_is_made_of_the_bodies_that_are_profiled_for_it() -> None:
    assert timed_passes_of(PPO_GRAPH.by_name["actor_generate"]) == (TimedPass.PREFILL, TimedPass.DECODE)
    assert timed_passes_of(PPO_GRAPH.by_name["reward_score"]) == (TimedPass.FORWARD,)
    assert timed_passes_of(PPO_GRAPH.by_name["critic_train"]) == (TimedPass.TRAIN, TimedPass.OPTIMIZER)


def test_a_factor_of_collectives_is_told_by_stages_that_exchange_differently() -> None:
    """Two groups that compute 2 and 3 times slower, collectives 5 times: y = f x + 5 z."""
    groups = [
        [(2 * 0.4 + 5 * 0.04, 0.4, 0.04), (2 * 0.5, 0.5, 0.0)],
        [(3 * 0.1 + 5 * 0.14, 0.1, 0.14), (0.9, 0.3, 0.0)],
    ]
    assert collective_factor(groups) == pytest.approx(5.0)
    assert collective_factor(groups[:1]) == pytest.approx(5.0)


@pytest.mark.parametrize(
    "groups",
    [[], [[(1.0, 0.5, 0.1)]], [[(1.0, 0.5, 0.1), (1.0, 0.5, 0.1)]], [[(1.0, 0.99, 0.01), (1.0, 1.0, 0.0)]]],
    ids=["no group", "one stage", "even shares", "hardly any"],
)
def test_a_trace_that_does_not_tell_a_factor_of_collectives_changes_none(
    groups: list[list[tuple[float, float, float]]],
) -> None:
    assert collective_factor(groups) is None


def test_what_a_step_takes_beyond_its_stages_is_found_by_halving() -> None:
    assert extra_transfer_seconds(5.0, lambda seconds: 2.0 + 3 * seconds) == pytest.approx(1.0)
    assert extra_transfer_seconds(2.0, lambda seconds: 2.0 + 3 * seconds) == 0.0
    assert extra_transfer_seconds(1.0, lambda seconds: 2.0 + 3 * seconds) == 0.0


def test_refits_and_the_whole_step_are_observed() -> None:
    seen = observe(trace(3), LAYOUTS, PPO_GRAPH, batch_size=32)
    assert seen.refit_seconds is None
    assert seen.step_seconds == pytest.approx(2.75)
    refits = [
        replace(span(step, "refit a -> b", rank, 0.5 + rank), kind="refit") for step in range(3) for rank in (0, 1)
    ]
    twice = [replace(item, instruction="refit a -> c") for item in refits]
    assert observe([*trace(3), *refits, *twice], LAYOUTS, PPO_GRAPH, batch_size=32).refit_seconds == pytest.approx(1.0)


def test_steps_that_overlap_take_what_each_adds() -> None:
    apart = trace(4)
    begun_early = [
        replace(item, start_seconds=item.start_seconds - 8 * item.step, end_seconds=item.end_seconds - 8 * item.step)
        for item in apart
    ]
    assert observe(apart, LAYOUTS, PPO_GRAPH, batch_size=32).step_seconds == pytest.approx(3.0)
    assert observe(begun_early, LAYOUTS, PPO_GRAPH, batch_size=32).step_seconds == pytest.approx(2.5)
