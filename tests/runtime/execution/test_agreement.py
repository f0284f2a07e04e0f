"""What one rank wishes all ranks do, behind the same turn."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from meshwright.runtime.execution.consensus import Consensus, RankRequest
from tests.runtime.ranks import run_on_ranks


def _moves(turn: int) -> bool:
    return turn == 2 and dist.get_rank() == 0


def wishes(max_steps_ahead: int) -> list[RankRequest]:
    """What a rank does behind each of 8 turns, of which rank 1 asks for an end behind the third; the ranks drift."""
    group = dist.new_group(backend="gloo")
    assert group is not None
    agreement, found = Consensus(group, max_steps_ahead=max_steps_ahead), []
    for turn in range(8):
        time.sleep(0.02 * dist.get_rank())
        found.append(
            agreement.after_period(
                RankRequest(save=turn == 1, stop=turn == 3 and dist.get_rank() == 1, replan=_moves(turn))
            )
        )
    agreement.flush()
    return found


@pytest.mark.parametrize(("max_steps_ahead", "delay"), [(0, 0), (2, 3)])
def test_all_ranks_do_behind_the_same_turn_what_one_of_them_wishes(max_steps_ahead: int, delay: int) -> None:
    one, other = run_on_ranks(2, wishes, max_steps_ahead)
    assert one == other
    assert [turn for turn, wish in enumerate(one) if wish.save] == [1 + delay]
    assert [turn for turn, wish in enumerate(one) if wish.stop] == [3 + delay]
    assert [turn for turn, wish in enumerate(one) if wish.replan] == [2 + delay]
    assert [turn for turn, wish in enumerate(one) if wish.ends] == [2 + delay, 3 + delay]
