"""Acceptance of drafted tokens: the mean tokens of a decode round, and the acceptance that a run observes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from meshwright.profiles.documents import parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.observations import draft_counts, observed_speculation
from meshwright.profiles.speculation import DraftRound, Speculation
from meshwright.profiles.stages import GENERATE
from meshwright.profiles.trace import Span
from meshwright.profiles.workload import ObservedLengths, Workload, lengths_of_workload, workload_with_lengths


def test_a_round_samples_one_token_and_the_accepted_drafts() -> None:
    speculation = Speculation(acceptance=(0.5, 0.8), drafted=0.5)
    assert speculation.round_of(0) == DraftRound(1, 1)
    assert speculation.round_of(1) == DraftRound(1 + 0.5 * 0.5, 1.5)
    assert speculation.round_of(2) == pytest.approx((1 + 0.5 * (0.5 + 0.5 * 0.8), 2))


def test_the_expected_tokens_are_the_mean_of_sampled_rounds() -> None:
    acceptance, drafted = (0.7, 0.6, 0.9), 0.8
    rng = np.random.default_rng(3)
    accepted = (rng.random((200_000, 3)) < np.array(acceptance)).cumprod(axis=1).sum(axis=1)
    mean = float((1 + accepted * (rng.random(200_000) < drafted)).mean())
    assert Speculation(acceptance=acceptance, drafted=drafted).round_of(3).sampled == pytest.approx(mean, rel=0.01)


def test_equal_acceptance_gives_the_published_sum() -> None:
    chance, count = 0.8, 4  # (1 - a^(k + 1)) / (1 - a), Leviathan et al., equation 1
    expected = (1 - chance ** (count + 1)) / (1 - chance)
    assert Speculation(acceptance=(chance,) * count).round_of(count).sampled == pytest.approx(expected)


def test_what_is_no_probability_is_refused_by_its_position() -> None:
    with pytest.raises(BadInput, match=r"acceptance of token 2 is 1\.2; give a probability from 0 to 1"):
        parse(Speculation, '{"acceptance": [0.5, 1.2]}', "workload.speculation")


def test_a_workload_has_no_acceptance_unless_it_is_stated() -> None:
    stated = {"batch_size": 4, "prompt": {"max": 4, "fixed": 4}, "response": {"max": 4, "fixed": 4}}
    assert parse(Workload, json.dumps(stated), "workload").speculation is None
    speculation = parse(Workload, json.dumps({**stated, "speculation": {"acceptance": [0.5]}}), "workload").speculation
    assert speculation == Speculation(acceptance=(0.5,))


def test_a_run_observes_the_acceptance_of_each_position() -> None:
    """Two ranks of a replica record the same; the share of rounds with a draft is that of the first position."""
    facts = {"num_row_rounds": 100.0, "num_drafted_0": 80.0, "num_accepted_0": 40.0, "num_drafted_1": 40.0}
    facts |= {"num_accepted_1": 30.0, "num_drafted_2": 0.0, "num_accepted_2": 0.0, "num_tokens": 7.0}
    spans = [
        Span(
            step=0,
            instruction=GENERATE,
            kind="stage",
            rank=rank,
            start_seconds=0,
            end_seconds=1,
            clock="measured",
            facts=facts,
        )
        for rank in (0, 1)
    ]
    counts = draft_counts(spans)
    assert counts["num_row_rounds"] == 200
    assert "num_tokens" not in counts
    assert observed_speculation(counts) == Speculation(acceptance=(0.5, 0.75), drafted=0.8)
    assert observed_speculation({}) is None


def test_a_run_that_never_found_a_draft_says_so() -> None:
    """The stated share would otherwise stay, and with it a step that no run reaches."""
    none = {"num_row_rounds": 100.0, "num_drafted_0": 0.0, "num_accepted_0": 0.0}
    observed = observed_speculation(none)
    assert observed is not None
    assert (observed.drafted, observed.round_of(1)) == (0, DraftRound(1, 1))
    assert Speculation(acceptance=(0.9, 0.8)).updated(observed) == Speculation(acceptance=(0.9, 0.8), drafted=0)
    assert observed_speculation({"num_row_rounds": 0.0, "num_drafted_0": 0.0}) is None


def test_observed_lengths_replace_the_stated_acceptance_as_far_as_drafts_went() -> None:
    lengths = LengthSpec(max=8, fixed=4)
    workload = Workload(batch_size=4, prompt=lengths, response=lengths, speculation=Speculation(acceptance=(0.5,) * 4))
    observed = ObservedLengths(
        prompt=lengths, response=lengths, speculation=Speculation(acceptance=(0.9, 0.8), drafted=0.7)
    )
    updated = workload_with_lengths(workload, observed)
    assert updated.speculation == Speculation(acceptance=(0.9, 0.8, 0.5, 0.5), drafted=0.7)
    assert workload_with_lengths(workload, lengths_of_workload(updated)).speculation == updated.speculation
    plain = workload.model_copy(update={"speculation": None})
    assert workload_with_lengths(plain, observed).speculation is None
