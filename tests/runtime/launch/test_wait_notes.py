"""A node that waits says for whom, since when and until when; one that need not wait says nothing."""

from __future__ import annotations

import re
import time

import pytest
from torch.distributed import DistError

from benchmarks.hosts import free_port
from meshwright.profiles.errors import RunFailed
from meshwright.runtime.launch import rendezvous_handler
from meshwright.runtime.launch.launch import MESSAGES_ONLY, launch
from meshwright.runtime.launch.rendezvous import Rendezvous
from meshwright.runtime.launch.rendezvous_handler import waiting_message, waiting_messages


def test_a_note_names_the_nodes_that_are_missing_and_both_times() -> None:
    place = Rendezvous(nodes=12, address="10.0.0.1", port=29500, timeout_seconds=600)
    began = time.mktime((2026, 11, 23, 11, 50, 0, 0, 0, -1))
    assert waiting_message(place, began, 10, [3, 7]) == (
        "waiting at 10.0.0.1:29500 for 2 nodes of 12 (node rank 3, 7) since 11:50:00, until 12:00:00: start "
        "`meshwright run` there with the same --rendezvous."
    )
    assert "for 1 node of 12 since" in waiting_message(place, began, 11, [])
    assert "(node rank 0, 1, 2, 3, 4, 5, 6, 7, ...)" in waiting_message(place, began, 1, range(9))


def test_notes_come_after_a_while_and_again_and_not_behind_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous_handler, "_FIRST_SECONDS", 0.1)
    monkeypatch.setattr(rendezvous_handler, "_NEXT_SECONDS", 0.1)
    with waiting_messages(lambda: "waiting"):
        time.sleep(0.5)
    found = capsys.readouterr().err.splitlines()
    assert len(found) >= 2
    assert set(found) == {"waiting"}
    with waiting_messages(lambda: "waiting"):
        pass

    def gone() -> str:
        raise DistError("the store is gone")

    with waiting_messages(gone):
        time.sleep(0.3)
    assert capsys.readouterr().err == ""


def test_where_all_nodes_have_come_there_is_nothing_to_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a busy machine they may take seconds to find each other."""
    monkeypatch.setattr(rendezvous_handler, "_FIRST_SECONDS", 0.1)
    with waiting_messages(lambda: waiting_message(Rendezvous(nodes=1), time.time(), 1, [])):
        time.sleep(0.3)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("node_rank", "who"), [(1, r" \(node rank 0, 2\)"), (None, "")])
def test_a_node_that_is_alone_says_who_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], node_rank: int | None, who: str
) -> None:
    monkeypatch.setattr(rendezvous_handler, "_FIRST_SECONDS", 0.3)
    place = Rendezvous(nodes=3, port=free_port(), node_rank=node_rank, timeout_seconds=2.0)
    with pytest.raises(RunFailed, match="1 of 3 nodes joined at"):
        launch(print, num_ranks=1, rendezvous=place, setup=MESSAGES_ONLY)
    [told] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("waiting")]
    assert re.match(rf"waiting at {place.endpoint} for 2 nodes of 3{who} since \d\d:\d\d:\d\d, until \d\d:\d\d", told)
