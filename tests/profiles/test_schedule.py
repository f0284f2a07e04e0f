"""A schedule refuses settings that mean nothing, and says whether its sequences outlive a turn."""

from dataclasses import fields

import pytest

from meshwright.profiles.errors import BadInput
from meshwright.profiles.schedule import Schedule

COUNTS = [field.name for field in fields(Schedule) if isinstance(field.default, int)]


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_below_its_least_is_refused_with_it(name: str) -> None:
    least = 1 if name in ("micro_batch_size", "batches_in_flight") else 0
    Schedule(**{"micro_batch_size": 0, "micro_batch_tokens": 1} if name == "micro_batch_tokens" else {name: least})
    with pytest.raises(BadInput, match=f"{name}={least - 1} must be {least} or more"):
        Schedule(**{name: least - 1})


def test_sequences_outlive_a_turn_by_batches_or_by_overcommit_and_not_by_both() -> None:
    assert [Schedule(batches_in_flight=b).keeps_in_flight for b in (1, 2)] == [False, True]
    assert [Schedule(overcommit=extra).keeps_in_flight for extra in (0, 1)] == [False, True]
    with pytest.raises(BadInput, match="overcommit=4 with batches_in_flight=2; set one of them"):
        Schedule(overcommit=4, batches_in_flight=2)


def test_schedules_have_an_order() -> None:
    """So that a search that is asked again takes the same one of several that cost alike."""
    assert sorted([Schedule(micro_batch_size=2), Schedule(generation_slots=3), Schedule()]) == [
        Schedule(),
        Schedule(generation_slots=3),
        Schedule(micro_batch_size=2),
    ]


def test_micro_batches_are_cut_by_rows_or_by_tokens_and_not_by_both() -> None:
    by_tokens = Schedule(micro_batch_size=0, micro_batch_tokens=512)
    assert [one.max_tokens(100) for one in (by_tokens, Schedule(micro_batch_size=4))] == [512, 400]
    with pytest.raises(BadInput, match="micro_batch_tokens=512 with micro_batch_size=1; set one of them"):
        Schedule(micro_batch_tokens=512)
