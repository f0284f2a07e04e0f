"""A log without end: every line is read once and in order, however it was cut into segments."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.profiles import run_logs
from meshwright.profiles.errors import BadInput
from meshwright.profiles.run_logs import Line, append_lines, drop_lines, log_files, read_log_lines, rename_log

SMALL = 64
"""Bytes of a segment here."""


def written(path: Path, numbers: range) -> None:
    for number in numbers:
        append_lines(path, [f"{number}\n"], segment_bytes=SMALL)


def read(path: Path) -> list[int]:
    return [int(line.text) for line in read_log_lines(*log_files(path))]


def drop_from(path: Path, first: int) -> None:
    def number(line: Line) -> int:
        return int(line.text)

    drop_lines(path, lambda line: number(line) >= first, lambda line: number(line) < first)


@settings(max_examples=25)
@given(num_lines=st.integers(0, 200), first=st.integers(0, 200))
def test_all_lines_are_read_in_order_and_those_from_a_step_on_can_be_dropped(
    tmp_path_factory: pytest.TempPathFactory, num_lines: int, first: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "trace.jsonl"
    written(path, range(num_lines))
    assert read(path) == list(range(num_lines))
    drop_from(path, first)
    assert read(path) == list(range(min(num_lines, first)))
    written(path, range(first, first + 50))
    assert read(path) == [*range(min(num_lines, first)), *range(first, first + 50)]


def test_segments_are_compressed_and_the_growing_file_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    written(path, range(500))
    *segments, growing = log_files(path)
    assert [segment.name for segment in segments[:2]] == [f"trace.segment-{n:06d}.jsonl.gz" for n in (1, 2)]
    assert growing.stat().st_size < SMALL
    assert all(len(gzip.decompress(segment.read_bytes())) < SMALL + 4 for segment in segments)
    assert set(tmp_path.iterdir()) == {*segments, growing}


def test_a_log_that_was_written_as_one_file_is_read_and_then_cut(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{number}\n" for number in range(100)))
    assert read(path) == list(range(100))
    written(path, range(100, 102))
    assert read(path) == list(range(102))
    assert len(log_files(path)) == 2


def test_a_process_that_ends_while_it_compresses_loses_and_doubles_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    plain, packed = (tmp_path / f"trace.segment-000001.jsonl{end}" for end in ("", ".gz"))
    plain.write_text("0\n1\n")
    written(path, range(2, 4))
    assert read(path) == [0, 1, 2, 3]
    packed.write_bytes(gzip.compress(b"0\n1\n"))
    assert read(path) == [0, 1, 2, 3]
    written(path, range(4, 40))
    assert read(path) == list(range(40))


def test_a_log_takes_another_name_with_all_its_segments_and_others_are_not_its_own(tmp_path: Path) -> None:
    path, target = tmp_path / "trace.jsonl", tmp_path / "trace-until-000002.jsonl"
    written(path, range(100))
    rename_log(path, target)
    written(path, range(3))
    assert (read(path), read(target)) == ([0, 1, 2], list(range(100)))


def test_a_damaged_segment_is_named(tmp_path: Path) -> None:
    packed = tmp_path / "trace.segment-000001.jsonl.gz"
    packed.write_bytes(gzip.compress(b"0\n" * 1000)[:-9])
    with pytest.raises(BadInput, match=r"segment-000001\.jsonl\.gz cannot be read: .*remove it to go on"):
        read(tmp_path / "trace.jsonl")


def test_a_log_may_have_any_name_and_no_line_of_it_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("in", "**", "a[1].jsonl"):
        assert log_files(tmp_path / name) == ()
    assert log_files(tmp_path / "missing" / "trace.jsonl") == ()
    monkeypatch.setattr(run_logs, "MAX_LINE_BYTES", 100)
    path = tmp_path / "trace.jsonl"
    path.write_text("x" * 99 + "\n" + "y" * 500)
    with pytest.raises(BadInput, match=r"trace.jsonl: line \d is longer than 100 bytes"):
        list(read_log_lines(path))
