"""Micro-batches are cut by rows or by tokens, and a sentence says what of either is not legal."""

from __future__ import annotations

import pytest

from meshwright.planner.job.job import Facts
from meshwright.planner.plan.layout_and_schedule_rules import rows_per_replica, schedule_rules, schedules
from meshwright.planner.plan.micro_batch_rules import ExtraChoices, micro_batch_sizes, token_capped_schedule, token_caps
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.layout import Layout
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.stages import Stage
from tests.planner.jobs import mixture_facts, small_facts

TRAIN, GENERATE, REF = (PPO_GRAPH.by_name[name] for name in ("actor_train", "actor_generate", "ref_logprob"))


def of_two_lengths() -> Facts:
    """A small job whose responses have 32 or 128 tokens behind 64 of a prompt: 192 at most."""
    facts = small_facts()
    lengths = {"response": LengthSpec(max=128, histogram=((32, 3), (128, 1)))}
    return facts.model_copy(update={"workload": facts.workload.model_copy(update=lengths)})


@pytest.mark.parametrize("rows", [1, 2, 6, 11, 103, 128, 171])
def test_of_uneven_rows_no_smaller_size_makes_as_few_micro_batches(rows: int) -> None:
    sizes = micro_batch_sizes(rows, is_even=False)
    numbers = [-(-rows // size) for size in sizes]
    assert sizes[0] == 1
    assert sizes[-1] == rows
    assert len(set(numbers)) == len(sizes) <= rows.bit_length() + 1
    assert all(-(-rows // (size - 1)) > number for size, number in zip(sizes[1:], numbers[1:], strict=True))


def test_even_rows_are_taken_in_sizes_that_divide_them() -> None:
    assert micro_batch_sizes(12, is_even=True) == (1, 2, 3, 4, 6, 12)
    assert micro_batch_sizes(16, is_even=False) == micro_batch_sizes(16, is_even=True)


def test_caps_are_powers_of_two_of_the_longest_and_fewer_than_all_rows() -> None:
    facts = of_two_lengths()
    assert token_caps(facts.workload, TRAIN, Layout(), 16) == (192, 384, 768, 1536)
    assert token_caps(facts.workload, TRAIN, Layout(dp=16), 1) == ()


def test_of_lengths_that_are_one_none_is_offered() -> None:
    assert token_caps(small_facts().workload, TRAIN, Layout(), 16) == ()


@pytest.mark.parametrize(
    ("stage", "layout"),
    [(GENERATE, Layout()), (REF, Layout(cp=2)), (TRAIN, Layout(pp=2, vpp=2)), (TRAIN, Layout(dp=2, ep=2))],
)
def test_none_is_offered_where_tokens_may_not_decide(stage: Stage, layout: Layout) -> None:
    assert token_caps(of_two_lengths().workload, stage, layout, 16) == ()


def test_what_is_offered_is_legal_and_comes_with_less_memory_first() -> None:
    facts = of_two_lengths()
    for stage in (TRAIN, REF):
        for layout in (Layout(), Layout(pp=2, dp=2), Layout(tp=2), Layout(dp=4)):
            found = schedules(facts, stage, layout)
            assert all(schedule_rules(facts, stage, layout, schedule) == () for schedule in found)
            rows = rows_per_replica(facts, stage, layout)
            assert len({schedule.micro_batch_tokens for schedule in found}) == rows.bit_length()
            assert len({schedule.micro_batch_size for schedule in found} - {0}) == (1 if layout.pp == 1 else 4)
            most = [schedule.max_tokens(192) for schedule in found if not schedule.chunk_tokens]
            assert most == sorted(most)


def test_every_number_of_rows_is_offered_where_they_are_wanted() -> None:
    found = schedules(of_two_lengths(), TRAIN, Layout(), extra_choices=ExtraChoices(by_rows=True))
    assert {schedule.micro_batch_size for schedule in found} == {0, 1, 2, 4, 8, 16}


def test_a_cap_of_one_s_own_is_offered_where_it_is_legal() -> None:
    found = schedules(
        of_two_lengths(), TRAIN, Layout(), extra_choices=ExtraChoices(caps=(191, 200, 192 * 16, 192 * 16 + 1))
    )
    assert {192, 200, 192 * 16} < {schedule.micro_batch_tokens for schedule in found}
    assert not {191, 192 * 16 + 1} & {schedule.micro_batch_tokens for schedule in found}


@pytest.mark.parametrize(
    ("layout", "cap", "says"),
    [
        (Layout(), 191, "micro_batch_tokens=191 has no room for the longest sequence, of 192 tokens; use 192."),
        (Layout(dp=4), 769, "micro_batch_tokens=769 is more than the 4 sequences of a replica can have; use 768."),
        (Layout(pp=2, vpp=2), 192, "with vpp=2, which needs micro-batches in multiples of pp=2; use 0, and"),
        (Layout(dp=2, ep=2), 192, "with ep=2, which needs equally many micro-batches on every replica; use 0, and"),
    ],
)
def test_a_cap_that_is_not_legal_is_told(layout: Layout, cap: int, says: str) -> None:
    assert says in " ".join(schedule_rules(mixture_facts(of_two_lengths()), TRAIN, layout, token_capped_schedule(cap)))
