"""Decode rounds with drafts: fewer rounds of more rows, whose cost decides whether they pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.protocol import StageQuery
from meshwright.cost_models.rounds import batch_rounds
from meshwright.profiles.frameworks import engine_named
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.speculation import Speculation
from meshwright.profiles.workload import Workload

Query = Callable[..., StageQuery]


def with_acceptance(workload: Workload, acceptance: Sequence[float], drafted: float = 1.0) -> Workload:
    speculation = Speculation(acceptance=tuple(acceptance), drafted=drafted)
    return workload.model_copy(update={"speculation": speculation})


def ratio(a100s: Callable[[int], Cluster], workload: Workload, query: Query, slots: int, draft_tokens: int) -> float:
    """The seconds of a generation with drafts over those without."""
    model = AnalyticModel(a100s(1), workload, "bf16")
    plain, drafted = (
        model.seconds(query("actor_generate", "tp1", slots=slots, draft_tokens=count)).total
        for count in (0, draft_tokens)
    )
    return drafted / plain


@pytest.mark.parametrize("slots", [5, 16, 64])
def test_rounds_with_drafts_sample_the_same_tokens_and_admit_the_same_prompts(long_tail: Workload, slots: int) -> None:
    rounds = batch_rounds(long_tail, 64, slots)
    drafted = rounds.with_drafts(2.5)
    assert 2.5 * drafted.num_decoded == pytest.approx(rounds.num_decoded)
    assert drafted.refills.calls * drafted.refills.rows == pytest.approx(rounds.refills.calls * rounds.refills.rows)
    assert drafted.num_rounds - 1 == pytest.approx((rounds.num_rounds - 1) / 2.5)
    assert rounds.refills.calls / 2.5 <= drafted.refills.calls <= min(rounds.refills.calls, drafted.num_rounds)
    assert rounds.with_drafts(1.0) == rounds


def test_a_draft_that_is_always_accepted_saves_rounds_where_weights_are_what_a_round_reads(
    a100s: Callable[[int], Cluster], query: Query, fixed: Workload
) -> None:
    """The 27 decode rounds of one row become 27 / 5 rounds of five rows, each of which takes hardly longer."""
    one = with_acceptance(fixed.model_copy(update={"batch_size": 1}), (1.0,) * 4)
    assert 1 / 5 < ratio(a100s, one, query, 1, 4) < 0.3


def test_drafts_that_are_never_accepted_only_cost(
    a100s: Callable[[int], Cluster], query: Query, long_tail: Workload
) -> None:
    workload = with_acceptance(long_tail, (0.0, 0.0))
    assert 1 <= ratio(a100s, workload, query, 1, 2) < 1.05  # three rows read the same weights as one
    assert ratio(a100s, workload, query, 256, 2) > 1.3
    assert ratio(a100s, with_acceptance(long_tail, (0.0, 0.0), drafted=0.01), query, 64, 2) == pytest.approx(
        1, abs=0.02
    )


def test_drafts_are_worth_less_the_more_rows_decode(
    a100s: Callable[[int], Cluster], query: Query, long_tail: Workload
) -> None:
    workload = with_acceptance(long_tail, (0.5, 0.5, 0.5, 0.5))
    found = [ratio(a100s, workload, query, slots, 4) for slots in (1, 32, 128, 512)]
    assert found == sorted(found)
    assert found[0] < 0.7
    assert found[-1] > 1  # compute is what a round of 512 x 5 rows takes


def test_an_engine_that_reads_the_cache_of_a_sequence_once_gains_more_from_drafts(
    a100s: Callable[[int], Cluster], query: Query, long_tail: Workload
) -> None:
    """Long prompts, so that the cache is most of what a round reads."""
    workload = with_acceptance(long_tail.model_copy(update={"prompt": LengthSpec(max=4096, fixed=4096)}), (0.6,) * 4)
    ratios = []
    for together in (False, True):
        engine = engine_named("vllm").model_copy(update={"verifies_together": together})
        model = AnalyticModel(a100s(1), workload, "bf16", engine=engine)
        plain, drafted = (model.seconds(query("actor_generate", "tp1", slots=32, draft_tokens=k)).total for k in (0, 4))
        ratios.append(drafted / plain)
    assert ratios[1] < 0.7
    assert ratios[0] > 1


def test_a_generation_with_drafts_has_the_terms_of_one_without(
    a100s: Callable[[int], Cluster], query: Query, long_tail: Workload
) -> None:
    model = AnalyticModel(a100s(1), with_acceptance(long_tail, (0.7, 0.7)), "bf16")
    plain, drafted = (
        model.seconds(query("actor_generate", "tp2,pp2,dp2", slots=32, draft_tokens=count)) for count in (0, 2)
    )
    assert [term.name for term in plain.terms] == [term.name for term in drafted.terms]
    assert drafted.total == pytest.approx(sum(term.amount for term in drafted.terms))
    assert plain.amount("prefill layers") == pytest.approx(drafted.amount("prefill layers"), rel=0.05)


@pytest.mark.parametrize("layout", ["tp1", "tp4,pp2", "pp2,dp4"])
@pytest.mark.parametrize("slots", [2, 16, 128])
def test_no_generation_with_drafts_is_faster_than_its_lower_bound(
    a100s: Callable[[int], Cluster], query: Query, long_tail: Workload, layout: str, slots: int
) -> None:
    model = AnalyticModel(a100s(1), with_acceptance(long_tail, (0.9, 0.8, 0.7, 0.6), 0.8), "bf16")
    for settings in ({}, {"batches_in_flight": 2}):
        for draft_tokens in (0, 2, 4):
            asked = query("actor_generate", layout, slots=slots, draft_tokens=draft_tokens, **settings)
            assert 0 < model.generation_lower_bound(asked) <= model.seconds(asked).total


def test_the_logits_of_every_drafted_token_need_memory(
    a100s: Callable[[int], Cluster], query: Query, long_tail: Workload
) -> None:
    model = AnalyticModel(a100s(1), with_acceptance(long_tail, (0.9,) * 4), "bf16")
    plain, drafted = (
        model.memory(query("actor_generate", "tp1", slots=32, draft_tokens=count)).transient for count in (0, 4)
    )
    assert drafted.amount("logits") == 5 * plain.amount("logits")
