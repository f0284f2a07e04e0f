"""A step's sequences are a prompt and a response each, and their lengths follow from its distributions."""

import json

import pytest

from meshwright.profiles.documents import parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.workload import Workload


def test_a_workload_adds_prompt_and_response() -> None:
    workload = Workload(batch_size=2, prompt=LengthSpec(max=4, fixed=3), response=LengthSpec(max=9, median=3, p99=8))
    assert workload.max_tokens == 13
    assert workload.mean_tokens == pytest.approx(workload.sequence_lengths.mean)


def test_a_changed_copy_forgets_the_old_lengths() -> None:
    """A copy used to keep the histogram that had been resolved before the change."""
    workload = Workload(batch_size=2, prompt=LengthSpec(max=4, fixed=3), response=LengthSpec(max=9, fixed=9))
    assert workload.sequence_lengths.mean == 12
    changed = workload.model_copy(update={"response": LengthSpec(max=9, fixed=1)})
    assert changed.sequence_lengths.mean == 4
    assert changed == workload.model_copy(update={"response": LengthSpec(max=9, fixed=1)})


def test_the_longest_sequence_is_as_likely_as_its_prompt_and_its_response() -> None:
    halves = LengthSpec(max=9, histogram=((2, 1.0), (4, 1.0)))
    lengths = Workload(batch_size=1, prompt=halves, response=halves).sequence_lengths
    assert dict(zip(lengths.tokens, lengths.probabilities, strict=True)) == {4: 0.25, 6: 0.5, 8: 0.25}


@pytest.mark.parametrize("field", ["batch_size", "num_minibatches", "num_epochs"])
def test_a_step_of_nothing_is_refused(field: str) -> None:
    lengths = {"max": 4, "fixed": 4}
    document = {"batch_size": 2, "prompt": lengths, "response": lengths, field: 0}
    with pytest.raises(BadInput, match=f"workload: {field} is 0: input should be greater than 0"):
        parse(Workload, json.dumps(document), "workload")


def test_a_group_has_one_prompt() -> None:
    lengths = LengthSpec(max=4, fixed=4)
    alone = Workload(batch_size=8, prompt=lengths, response=lengths)
    assert alone.num_prompts == 8
    grouped = Workload(batch_size=8, group_size=4, prompt=lengths, response=lengths)
    assert grouped.num_prompts == 2
    assert parse(Workload, grouped.model_dump_json(), "workload") == grouped


@pytest.mark.parametrize(("batch_size", "near"), [(10, "8 or 12"), (3, "4")])
def test_a_batch_of_broken_groups_is_refused(batch_size: int, near: str) -> None:
    lengths = {"max": 4, "fixed": 4}
    document = {"batch_size": batch_size, "group_size": 4, "prompt": lengths, "response": lengths}
    with pytest.raises(BadInput, match=f"workload: batch_size={batch_size} is not a multiple of .* use {near}"):
        parse(Workload, json.dumps(document), "workload")


def test_the_candidates_of_a_batch_are_all_samples_that_are_drawn_of_its_prompts() -> None:
    lengths = LengthSpec(max=4, fixed=4)
    plain = Workload(batch_size=8, group_size=2, num_minibatches=2, prompt=lengths, response=lengths)
    assert plain.candidates is plain
    assert not plain.selects_samples
    best = plain.model_copy(update={"best_of": 6})
    assert parse(Workload, best.model_dump_json(), "workload") == best
    assert best.selects_samples
    assert best.wave == best.candidates
    drawn = best.candidates
    assert (drawn.batch_size, drawn.group_size, drawn.num_prompts) == (24, 6, best.num_prompts)
    assert drawn == Workload(batch_size=24, group_size=6, prompt=lengths, response=lengths)
