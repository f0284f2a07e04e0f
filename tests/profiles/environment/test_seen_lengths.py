"""A workload takes lengths that were seen, and keeps its own greatest ones."""

from __future__ import annotations

import pytest

from meshwright.profiles.environment.dynamic_sampling import MIN_ACCEPTANCE, DynamicSampling
from meshwright.profiles.environment.turns import ToolTurns
from meshwright.profiles.errors import BadInput
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.workload import ObservedLengths, Workload, lengths_of_workload, workload_with_lengths

SEEN = ObservedLengths(prompt=LengthSpec(max=40, fixed=40), response=LengthSpec(max=8, histogram=((4, 1.0), (8, 3.0))))
TURNS = ToolTurns(number=LengthSpec(max=4, fixed=3), result=LengthSpec(max=6, fixed=5), max_tokens=400)


def test_lengths_are_as_they_were_seen_and_longer_ones_are_cut(workload: Workload) -> None:
    found = workload_with_lengths(workload, SEEN)
    assert found.response_lengths.mean == 7.0
    assert found.prompt_lengths.tokens == (16,)
    assert (found.prompt.max, found.response.max, found.batch_size) == (16, 96, 32)


def test_lengths_that_were_taken_over_are_taken_over_again_as_they_are(workload: Workload) -> None:
    found = workload_with_lengths(
        workload, ObservedLengths(prompt=LengthSpec(max=9, median=3.0, p99=9.0), response=SEEN.response)
    )
    assert workload_with_lengths(workload, lengths_of_workload(found)) == found


def test_turns_keep_their_greatest_number_and_the_most_tokens_of_a_rollout(workload: Workload) -> None:
    longer = TURNS.model_copy(update={"number": LengthSpec(max=9, fixed=9), "max_tokens": 4000})
    several = workload.model_copy(update={"turns": TURNS})
    found = workload_with_lengths(several, SEEN.model_copy(update={"turns": longer}))
    assert found.turns is not None
    assert found.turns.mean_calls == 3.0
    assert found.turns.max_tokens == 400


def test_groups_with_a_signal_are_those_that_dynamic_sampling_keeps(workload: Workload) -> None:
    seen = SEEN.model_copy(update={"groups_with_signal": (0.5, 0.9, 0.0)})
    assert workload_with_lengths(workload, seen).dynamic_sampling is None
    sampled = workload.model_copy(update={"dynamic_sampling": DynamicSampling(acceptance=0.2, num_prompts=7)})
    found = workload_with_lengths(sampled, seen).dynamic_sampling
    assert found is not None
    assert [share for share, _ in found.shares] == [0.5, 0.9, MIN_ACCEPTANCE]
    assert found.num_prompts == 7


def test_turns_on_one_side_alone_are_refused(workload: Workload) -> None:
    with pytest.raises(BadInput, match=r"multi-turn rollouts, and the job has no workload\.turns; add it"):
        workload_with_lengths(workload, SEEN.model_copy(update={"turns": TURNS}))
    with pytest.raises(BadInput, match=r"rollouts of one turn, and workload\.turns of the job"):
        workload_with_lengths(workload.model_copy(update={"turns": TURNS}), SEEN)
