"""What is written of restarts is read as one for each, whichever nodes wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.profiles.errors import BadInput
from meshwright.runtime.records.restarts import Restart, read_restarts, steps_recorded, write_restart

ONE = Restart(number=1, host="a", reason="rank 1 ended with SIGKILL.", reached=5, saved=3)


def test_a_run_that_was_never_started_again_has_none(tmp_path: Path) -> None:
    assert read_restarts(tmp_path) == ()
    assert steps_recorded(tmp_path) == 0


def test_what_several_nodes_wrote_is_one_restart_with_all_reasons(tmp_path: Path) -> None:
    other = Restart(number=1, host="b", reason="rank 0 lost rank 1", reached=4, saved=3)
    note = Restart(number=1, host="a", reason="", reached=0, saved=0, replan_note="1 of 2 nodes are left")
    for one in (ONE, other, note, Restart(number=2, host="a", reason="full disk", reached=3, saved=3)):
        write_restart(tmp_path, one)
    first, second = read_restarts(tmp_path)
    assert first.message == (
        "restart 1 from step 3, 2 steps lost: rank 1 ended with SIGKILL; rank 0 lost rank 1; 1 of 2 nodes are left"
    )
    assert first.host == "a, b"
    over = Restart(number=3, host="a", reason="", reached=4, saved=4, replan_note="planned again")
    assert over.message == "restart 3 from step 4, 0 steps lost: planned again"
    assert (second.number, second.lost) == (2, 0)


def test_a_step_counts_once_its_line_is_whole(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"ste')
    assert steps_recorded(tmp_path) == 2


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"number": "1"}', "[" * 100_000])
def test_what_is_no_restart_is_told_with_its_line(tmp_path: Path, line: str) -> None:
    write_restart(tmp_path, ONE)
    with (tmp_path / "restarts.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(BadInput, match=r"restarts\.jsonl line 2"):
        read_restarts(tmp_path)


def test_a_line_that_was_cut_short_is_no_restart(tmp_path: Path) -> None:
    write_restart(tmp_path, ONE)
    with (tmp_path / "restarts.jsonl").open("a") as file:
        file.write('{"number": 2, "ho')
    assert [one.number for one in read_restarts(tmp_path)] == [1]
