"""Rows are dealt to replicas of nearly equal work, and to micro-batches of nearly equal tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshwright.profiles.model_parts.hf_config import SlidingWindow
from meshwright.profiles.packing import (
    ReplicaAssignment,
    assign_to_replicas,
    assigned_rows,
    generation_rows,
    micro_batches,
    micro_batches_by_rows,
    micro_batches_by_tokens,
    replica_rows,
    row_work,
    rows_per_prompt,
    rows_per_replica,
)
from meshwright.profiles.schedule import Schedule
from tests.planner.jobs import model_spec

SPEC = model_spec("actor")


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 9))
def test_every_row_is_dealt_once_into_as_few_micro_batches_as_may_be(lengths: list[int], size: int) -> None:
    dealt = micro_batches_by_rows(lengths, size)
    assert sorted(index for micro_batch in dealt for index in micro_batch) == list(range(len(lengths)))
    assert len(dealt) == -(-len(lengths) // size)
    assert all(1 <= len(micro_batch) <= size for micro_batch in dealt)


def test_the_longest_goes_first_and_to_the_fewest_tokens_that_have_room() -> None:
    # 90 and 50 begin, 40 joins 50, and only beside 90 is there room for 10.
    assert micro_batches_by_rows([10, 40, 90, 50], 2) == ((2, 0), (3, 1))
    # 40 joins 50; at 90 tokens each, 20 goes to the first, 10 to the second, which has fewer then, as 5 has no choice.
    assert micro_batches_by_rows([90, 50, 40, 20, 10, 5], 3) == ((0, 3, 5), (1, 2, 4))


def test_a_long_tail_is_spread_evenly() -> None:
    lengths = [200, 150, *[60] * 14, *[30] * 16]
    dealt = micro_batches_by_rows(lengths, 8)
    sums = [sum(lengths[index] for index in micro_batch) for micro_batch in dealt]
    assert max(sums) < 1.25 * min(sums)


@given(st.lists(st.integers(1, 500), max_size=40), st.integers(500, 3000))
def test_under_a_cap_every_row_is_dealt_once_and_no_micro_batch_has_more_tokens(lengths: list[int], cap: int) -> None:
    dealt = micro_batches_by_tokens(lengths, cap)
    assert sorted(index for micro_batch in dealt for index in micro_batch) == list(range(len(lengths)))
    sums = [sum(lengths[index] for index in micro_batch) for micro_batch in dealt]
    assert all(0 < tokens <= cap for tokens in sums)
    assert len(dealt) <= 1.5 * math.ceil(sum(lengths) / cap) + 1 + sum(2 * length > cap for length in lengths)


def test_a_cap_is_met_by_the_fewest_micro_batches_that_are_dealt_evenly() -> None:
    # Of 100 tokens each, two have no room for 60, 60 and 60; three have 60 with 20, 60 with 20, and 60.
    assert micro_batches_by_tokens([60, 60, 60, 20, 20], 100) == ((0, 3), (1, 4), (2,))
    assert micro_batches_by_tokens([10, 40, 90, 50], 100) == ((2, 0), (3, 1))
    assert micro_batches_by_tokens([10, 40, 90, 50], 190) == ((2, 3, 1, 0),)


@given(st.integers(0, 600), st.integers(1, 50))
def test_replicas_have_as_many_rows_as_the_next_and_the_first_ones_one_more(num_rows: int, num_replicas: int) -> None:
    rows = rows_per_replica(num_rows, num_replicas)
    assert len(rows) == num_replicas
    assert sum(rows) == num_rows
    assert rows[0] - rows[-1] == (num_rows % num_replicas > 0)
    assert rows == tuple(sorted(rows, reverse=True))


@given(st.lists(st.integers(1, 500), max_size=40), st.integers(1, 9))
def test_every_row_is_dealt_to_one_replica_and_each_has_its_number(lengths: list[int], num_replicas: int) -> None:
    dealt = assign_to_replicas(lengths, (num_replicas,))
    assert sorted(index for replica in dealt for index in replica) == list(range(len(lengths)))
    assert tuple(map(len, dealt)) == rows_per_replica(len(lengths), num_replicas)


@given(st.lists(st.integers(1, 500), min_size=4, max_size=40), st.integers(1, 3), st.integers(1, 3), st.data())
def test_rows_that_are_dealt_by_speed_go_to_each_kind_in_their_number(
    lengths: list[int], first: int, other: int, data: st.DataObject
) -> None:
    mine = data.draw(st.integers(1, len(lengths) - 1))
    rows = mine, len(lengths) - mine
    dealt = assign_to_replicas(lengths, (first, other), rows)
    assert sorted(index for replica in dealt for index in replica) == list(range(len(lengths)))
    each = rows_per_replica(rows[0], first), rows_per_replica(rows[1], other)
    assert tuple(map(len, dealt)) == (*each[0], *each[1])


ROUNDED = [
    1,
    1,
    1,
    1,
    1,
    1,
    67,
    189,
    149,
    212,
    152,
    30,
    245,
    229,
    149,
    250,
    254,
    2,
    1,
    246,
    278,
    325,
    293,
    290,
    289,
    331,
    308,
    498,
    446,
    500,
    447,
    500,
    500,
    250,
]
"""Of which two sums are equal, and are not when each is divided before they are added."""


@example(ROUNDED)
@given(st.lists(st.integers(1, 500), min_size=2, max_size=40).filter(lambda lengths: len(lengths) % 2 == 0))
def test_two_kinds_of_one_speed_share_rows_as_one_kind_does(lengths: list[int]) -> None:
    half = len(lengths) // 2
    assert assign_to_replicas(lengths, (1, 1), (half, half)) == assign_to_replicas(lengths, (2,))


def test_who_has_thrice_the_rows_has_nearly_thrice_the_tokens() -> None:
    lengths = np.random.default_rng(0).integers(1, 4000, 256).tolist()
    slow, _ = assign_to_replicas(lengths, (1, 1), (64, 192))
    share = sum(lengths[row] for row in slow) / sum(lengths)
    assert abs(share - 1 / 4) < 1e-3


def test_other_numbers_of_rows_are_shared_in_proportion() -> None:
    dealt = assign_to_replicas([7] * 10, (1, 2), (2, 6))
    assert tuple(map(len, dealt)) == (2, 4, 4)
    assert tuple(map(len, assign_to_replicas([7], (1, 2), (2, 6)))) == (0, 1, 0)


def test_uneven_replicas_have_nearly_as_many_tokens() -> None:
    # 90 and 50 begin; 40 and 30 join 50, which is full then, and 90 takes what is left.
    assert assign_to_replicas([10, 30, 40, 90, 50], (2,)) == ((3, 1, 0), (4, 2))


@pytest.mark.parametrize("window", [None, SlidingWindow(num_tokens=7), SlidingWindow(num_tokens=3, first=1, every=2)])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_the_work_of_a_row_is_its_products_with_weights_and_those_of_the_pairs_that_attention_sees(
    role: str, window: SlidingWindow | None
) -> None:
    model = replace(model_spec(role), window=window)
    weights = sum(model.active_layer_params) + (model.hidden_size if model.scalar_head else 256 * model.hidden_size)
    with_window = range(window.first, 4, window.every) if window else ()
    for length in (1, 5, 40):
        seen = [
            min(token, window.num_tokens) if window and layer in with_window else token
            for layer in range(4)
            for token in range(1, length + 1)
        ]
        of_pair = 2 * model.num_heads * model.head_dim
        assert row_work(model, [length]) == [length * weights + of_pair * sum(seen)]


def test_a_row_of_twice_the_tokens_is_more_than_twice_the_work() -> None:
    short, long, again = row_work(SPEC, [1000, 2000, 1000])
    assert short == again
    assert 2 * short < long < 4 * short


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.integers(1, 9))
def test_where_any_number_goes_every_row_is_dealt_once_and_no_replica_has_a_row_more_work_than_another(
    lengths: list[int], num_replicas: int
) -> None:
    dealt = ReplicaAssignment(SPEC, (num_replicas,), any_number=True).assign(lengths)
    assert sorted(index for replica in dealt for index in replica) == list(range(len(lengths)))
    assert sum(1 for replica in dealt if replica) == min(num_replicas, len(lengths))
    work = row_work(SPEC, lengths)
    sums = [sum(work[index] for index in replica) for replica in dealt]
    assert max(sums) - min(sums) <= max(work)


def test_work_deals_a_long_tail_more_evenly_than_tokens_and_most_evenly_where_any_number_goes() -> None:
    lengths = np.minimum(12_000, np.random.default_rng(0).lognormal(6.2, 1.2, 256) + 200).astype(int).tolist()
    work = row_work(SPEC, lengths)

    def unevenness(dealt: tuple[tuple[int, ...], ...]) -> float:
        sums = [sum(work[index] for index in replica) for replica in dealt]
        return max(sums) * len(sums) / sum(sums) - 1

    by_tokens = unevenness(assign_to_replicas(lengths, (8,)))
    by_work = unevenness(ReplicaAssignment(SPEC, (8,)).assign(lengths))
    by_work_alone = unevenness(ReplicaAssignment(SPEC, (8,), any_number=True).assign(lengths))
    assert by_work_alone < by_work < by_tokens
    assert by_work_alone < 0.1 * by_tokens


@given(st.lists(st.integers(1, 500), min_size=4, max_size=40), st.integers(1, 3))
def test_rows_of_one_length_are_dealt_alike_by_any_rule(lengths: list[int], num_replicas: int) -> None:
    alike = [lengths[0]] * len(lengths)
    by_number = ReplicaAssignment(SPEC, (num_replicas,)).assign(alike)
    assert ReplicaAssignment(SPEC, (num_replicas,), any_number=True).assign(alike) == by_number
    assert assign_to_replicas(alike, (num_replicas,)) == by_number


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 7))
def test_every_row_is_generated_once_and_groups_stay_together_where_they_come_out_even(
    num_prompts: int, group_size: int, num_replicas: int
) -> None:
    num_rows = num_prompts * group_size
    shares = [replica_rows(num_rows, group_size, replica, num_replicas) for replica in range(num_replicas)]
    assert sorted(row for share in shares for row in share) == list(range(num_rows))
    size = rows_per_prompt(num_rows, group_size, num_replicas)
    assert size in (1, group_size)
    if num_prompts % num_replicas == 0:
        assert size == group_size
        assert [len(share) for share in shares] == list(rows_per_replica(num_rows, num_replicas))
    for share in shares:
        groups = [share[first : first + size] for first in range(0, len(share), size)]
        assert all(len({row // size for row in group}) == 1 for group in groups)


def test_single_rows_are_shared_one_by_one() -> None:
    assert [replica_rows(5, 1, replica, 2) for replica in range(2)] == [(0, 2, 4), (1, 3)]


@given(st.dictionaries(st.integers(0, 40), st.integers(1, 99), min_size=1), st.integers(1, 5))
def test_replicas_share_all_rows_and_each_row_once(lengths: dict[int, int], num_replicas: int) -> None:
    shares = [generation_rows(tuple(lengths), lengths, replica, num_replicas) for replica in range(num_replicas)]
    assert sorted(row for part in shares for row in part) == sorted(lengths)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all([lengths[row] for row in part] == sorted(lengths[row] for row in part) for part in shares)


def test_rows_of_like_length_are_spread_over_replicas() -> None:
    lengths = dict(enumerate([5, 50, 6, 60, 7, 70]))
    assert generation_rows((0, 1, 2, 3, 4, 5), lengths, 0, 2) == (0, 4, 3)
    assert generation_rows((0, 1, 2, 3, 4, 5), lengths, 1, 2) == (2, 1, 5)


@given(st.dictionaries(st.integers(0, 40), st.integers(1, 99), min_size=1), st.integers(1, 5))
def test_replicas_read_as_many_rows_as_they_generate_and_each_row_once(
    lengths: dict[int, int], num_replicas: int
) -> None:
    replicas = range(num_replicas)
    deal_of = ReplicaAssignment(SPEC, (num_replicas,))
    shares = [assigned_rows(tuple(lengths), lengths, replica, deal_of) for replica in replicas]
    assert sorted(row for part in shares for row in part) == sorted(lengths)
    assert tuple(map(len, shares)) == rows_per_replica(len(lengths), num_replicas)
    assert [len(part) for part in shares] == [
        len(generation_rows(tuple(lengths), lengths, r, num_replicas)) for r in replicas
    ]


def test_a_kind_that_is_thrice_as_fast_takes_three_of_four_rows() -> None:
    lengths = dict.fromkeys(range(8), 10)
    shares = [
        assigned_rows(range(8), lengths, replica, ReplicaAssignment(SPEC, (1, 1), (6, 2))) for replica in range(2)
    ]
    assert sorted(row for part in shares for row in part) == list(range(8))
    assert list(map(len, shares)) == [6, 2]


def test_replicas_have_nearly_as_many_tokens_where_one_row_is_long() -> None:
    lengths = dict(enumerate([90, 10, 20, 30, 25, 35]))
    dealt = [assigned_rows(range(6), lengths, replica, ReplicaAssignment(SPEC, (2,))) for replica in range(2)]
    assert [sum(lengths[row] for row in rows) for rows in dealt] == [120, 90]
    assert [sum(lengths[row] for row in generation_rows(range(6), lengths, replica, 2)) for replica in range(2)] == [
        70,
        140,
    ]


def test_a_long_row_may_leave_all_others_to_the_other_replica() -> None:
    lengths = dict(enumerate([90, 10, 20, 30, 25, 5]))
    dealt = [assigned_rows(range(6), lengths, r, ReplicaAssignment(SPEC, (2,), any_number=True)) for r in range(2)]
    assert dealt == [(0,), (3, 4, 2, 1, 5)]


def test_the_longest_row_meets_the_shortest_in_a_micro_batch() -> None:
    assert micro_batches((4, 1, 3, 2), {1: 30, 2: 5, 3: 10, 4: 80}, Schedule(micro_batch_size=2)) == (
        (4, 2),
        (1, 3),
    )
