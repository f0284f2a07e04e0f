"""A file that grows is read line by line, each line once, and from its beginning when it is another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.profiles.documents import write_atomically
from meshwright.profiles.errors import BadInput
from meshwright.runtime.records.run_lines import Tail


@given(st.lists(st.text("ab\n", max_size=5)))
def test_however_a_file_is_appended_to_every_whole_line_is_read_once(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("tail") / "lines"
    tail, read = Tail(path), []
    for part in parts:
        with path.open("a") as file:
            file.write(part)
        read += tail.read()[1]
    assert read == "".join(parts).rpartition("\n")[0].split("\n") * ("\n" in "".join(parts))


def test_a_file_that_is_replaced_or_cut_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    assert tail.read() == (False, [])
    path.write_text("a\nb\n")
    assert tail.read() == (True, ["a", "b"])
    assert tail.read() == (False, [])
    write_atomically(path, "a\nb\nc\n")
    assert tail.read() == (True, ["a", "b", "c"])
    path.write_text("d\n")
    assert tail.read() == (True, ["d"])


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="is a device or a pipe"):
        Tail(tmp_path / "pipe").read()


def test_a_long_file_may_be_passed_over_and_only_so_many_lines_are_held(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("".join(f"{number}\n" for number in range(30_000)) + "cut")
    assert Tail(path, 3).read() == (True, ["29997", "29998", "29999"])
    tail = Tail(path)
    assert tail.skip()
    assert not tail.skip()
    with path.open("a") as file:
        file.write(" off\nnew\n")
    assert tail.read() == (False, ["cut off", "new"])
    (tmp_path / "other").write_text("x" * 70_000)
    other = Tail(tmp_path / "other")
    assert other.skip()
    assert other.read() == (False, [])
