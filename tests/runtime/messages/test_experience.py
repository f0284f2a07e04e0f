"""Experience: shares are balanced and complete, and what is sent arrives as it was."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.program.program import Receive, Send
from meshwright.profiles.errors import RunFailed
from meshwright.profiles.packing import ReplicaAssignment, rows_per_replica
from meshwright.profiles.schedule import Schedule
from meshwright.runtime.messages.experience import (
    Experience,
    ExperienceTransport,
    assigned_rows,
    generation_rows,
    micro_batches,
)
from meshwright.runtime.messages.transport import ProcessRanks, Transport
from tests.planner.jobs import model_spec
from tests.runtime.ranks import run_on_ranks

SPEC = model_spec("actor")


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


def test_a_packed_field_unpacks_to_the_same_rows() -> None:
    sent, received = Experience(), Experience()
    sent.put("tokens", 3, torch.tensor([1, 2, 3]))
    sent.put("tokens", 10, torch.tensor([4]))
    sent.put("scores", 3, torch.tensor([0.5]))
    received.unpack(sent.pack(("tokens", "scores"), 0))
    assert received.rows("tokens") == (3, 10)
    assert torch.equal(received.get("tokens", 3), torch.tensor([1, 2, 3]))
    assert torch.equal(received.padded("tokens", (10, 3), 4), torch.tensor([[4, 0, 0, 0], [1, 2, 3, 0]]))
    assert float(received.get("scores", 3)) == 0.5


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64])
def test_rows_of_every_type_arrive_as_they_were_beside_an_odd_number_of_bytes(dtype: torch.dtype) -> None:
    sent, received = Experience(), Experience()
    rows = {row: torch.arange(row % 4).to(dtype) for row in range(9)}
    for row, values in rows.items():
        sent.put("a field", row, values)
        sent.put("truncated", row, torch.ones(1, dtype=torch.uint8))
    received.unpack(sent.pack(("a field", "truncated", "not held"), 0))
    assert received.rows("not held") == ()
    for row, values in rows.items():
        assert received.get("a field", row).dtype is dtype
        assert torch.equal(received.get("a field", row), values)


def exchange() -> tuple[int, ...]:
    """Ranks 0 and 1 own a row each; ranks 1 and 2 want both."""
    exchange, experience, rank = (
        ExperienceTransport(Transport(dist.group.WORLD)),
        Experience(),
        dist.get_rank(),
    )
    if rank < 2:
        experience.put("scores", rank, torch.tensor([float(rank)]))
    names = {"producer": "reward_score", "consumer": "actor_train", "fields": ("scores",)}
    if rank < 2:
        exchange.send(Send(**names, ranks=(0, 1), targets=(1, 2)), experience, 7, 0)
    if rank > 0:
        exchange.receive(Receive(**names, ranks=(1, 2), owners=(0, 1)), experience, 7, 0)
    exchange.flush()
    return experience.rows("scores")


@pytest.mark.parametrize("written", [4, 6])
def test_what_was_written_for_another_step_is_refused_whether_older_or_newer(written: int) -> None:
    names = {"producer": "reward_score", "consumer": "actor_train", "fields": ("scores",)}
    process = ProcessRanks(2)
    owner, reader = (
        ExperienceTransport(Transport(None, rank=rank, process=process))  # type: ignore[arg-type]
        for rank in range(2)
    )
    owner.send(Send(**names, ranks=(0,), targets=(1,)), Experience(), 7, written)
    with pytest.raises(RunFailed, match=f"step 5: rank 0 sent the output of reward_score for step {written}"):
        reader.receive(Receive(**names, ranks=(1,), owners=(0,)), Experience(), 7, 5)


@pytest.mark.slow
def test_every_target_ends_up_with_the_rows_of_every_owner() -> None:
    assert run_on_ranks(3, exchange) == [(0,), (0, 1), (0, 1)]
