"""What things took in a step: waiting for the rank that comes last is no part of it."""

from __future__ import annotations

import pytest

from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.layout import Layout
from meshwright.profiles.observations import refit_seconds, stage_seconds
from meshwright.profiles.trace import Span


def span(rank: int, start: float, end: float, name: str = "actor_train", kind: str = "stage") -> Span:
    return Span(step=0, instruction=name, kind=kind, rank=rank, start_seconds=start, end_seconds=end, clock="measured")


def taken(stage: str, layout: str, *times: tuple[float, float], first_rank: int = 4) -> float:
    """Of a stage whose ranks begin and end at these times."""
    spans = [span(first_rank + index, *time) for index, time in enumerate(times)]
    return stage_seconds(PPO_GRAPH.by_name[stage], Layout.parse(layout), spans[::-1])


def test_training_replicas_wait_for_each_other() -> None:
    assert taken("actor_train", "dp2", (0.0, 5.0), (3.0, 5.5)) == 2.5


def test_replicas_that_score_do_not() -> None:
    assert taken("ref_logprob", "dp2", (0.0, 2.0), (3.0, 4.0)) == 2.0
    assert taken("actor_generate", "dp2", (0.0, 2.0), (3.0, 4.0)) == 2.0


@pytest.mark.parametrize("layout", ["tp2,dp2", "pp2,dp2"])
def test_the_ranks_of_a_replica_do(layout: str) -> None:
    """In a pipeline the ranks of one replica are not neighbours."""
    times = {0: (0.0, 6.0), 1: (2.0, 3.0)}  # by replica, of the rank that comes first
    late = {0: (4.0, 6.0), 1: (2.5, 3.5)}
    order = (
        [(0, times), (0, late), (1, times), (1, late)]
        if layout[0] == "t"
        else [(r, t) for t in (times, late) for r in (0, 1)]
    )
    assert taken("ref_logprob", layout, *(when[replica] for replica, when in order)) == 2.0


def test_replicas_that_share_experts_wait_for_each_other() -> None:
    assert taken("actor_generate", "dp2,ep2", (0.0, 5.0), (3.0, 5.5)) == 2.5


def test_waves_of_a_step_add_up() -> None:
    """Each as long as its slowest rank goes on behind the last one that begins."""
    spans = [span(0, 0.0, 2.0), span(1, 1.0, 2.5), span(0, 4.0, 5.0), span(1, 4.0, 6.0)]
    assert stage_seconds(PPO_GRAPH.by_name["ref_logprob"], Layout.parse("tp2"), spans) == 1.5 + 2.0


def test_a_refit_takes_what_it_takes_the_rank_that_comes_last() -> None:
    waited = [span(0, 0.0, 4.0, "refit a", "refit"), span(1, 3.0, 4.0, "refit a", "refit")]
    again = [span(1, 4.0, 6.0, "refit b", "refit"), span(2, 0.0, 6.0, "refit b", "refit")]
    assert refit_seconds([*waited, *again, span(0, 0.0, 9.0)]) == 3.0
    assert refit_seconds([span(0, 0.0, 9.0)]) == 0.0
