"""Experience: what is sent arrives as it was."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from meshwright.planner.program.program import Receive, Send
from meshwright.profiles.errors import RunFailed
from meshwright.runtime.messages.experience import Experience, ExperienceTransport
from meshwright.runtime.messages.transport import ProcessRanks, Transport
from tests.runtime.ranks import run_on_ranks


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
