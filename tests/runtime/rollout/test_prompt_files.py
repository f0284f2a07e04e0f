"""The same rows are read from every kind of file, and what is wrong with one is told in a sentence."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.profiles.errors import BadInput
from meshwright.runtime.rollout.prompt_files import read_rows

COLUMNS = {"prompt": "question", "answer": "reward_model.ground_truth"}

MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": st.text(max_size=5)})

ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "question": st.lists(MESSAGE, min_size=1, max_size=2),
            "reward_model": st.fixed_dictionaries({"ground_truth": st.text(max_size=3)}),
            "number": st.integers(0, 9),
        }
    ),
    min_size=1,
    max_size=9,
)


def read(path: Path, split: str = "train") -> list[dict[str, Any]]:
    return [dict(row.values) for row in read_rows(path, COLUMNS, split)]


def lines(rows: list[dict[str, Any]], path: Path) -> Path:
    path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    return path


def parquet(rows: list[dict[str, Any]], path: Path) -> Path:
    pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def saved(rows: list[dict[str, Any]], path: Path) -> Path:
    """As `Dataset.save_to_disk` of datasets 5.2 writes it, in two shards."""
    path.mkdir(exist_ok=True)
    table = pa.Table.from_pylist(rows)
    names = [f"data-0000{shard}-of-00002.arrow" for shard in range(2)]
    half = len(rows) // 2
    for name, part in zip(names, (table.slice(0, half), table.slice(half)), strict=True):
        with pa.OSFile(str(path / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(part)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return path


@settings(max_examples=25)
@given(ROWS)
def test_rows_are_those_that_were_written_whatever_the_file(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    out = tmp_path_factory.mktemp("rows")
    wanted = [{"prompt": row["question"], "answer": row["reward_model"]["ground_truth"]} for row in rows]
    assert read(lines(rows, out / "rows.jsonl")) == wanted
    assert read(parquet(rows, out / "rows.parquet")) == wanted
    assert read(saved(rows, out / "saved")) == wanted
    splits = out / "splits"
    splits.mkdir()
    (splits / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    saved(rows, splits / "test")
    assert read(splits, "test") == wanted


ROW = {"question": "why?", "reward_model": {"ground_truth": "42"}, "number": 1}


def test_a_directory_of_a_hub_has_its_splits_by_the_names_of_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for shard in range(2):
        parquet([{**ROW, "question": f"q{shard}"}], tmp_path / "data" / f"train-0000{shard}-of-00002.parquet")
    lines([ROW], tmp_path / "test.jsonl")
    assert [row["prompt"] for row in read(tmp_path)] == ["q0", "q1"]
    assert [row["prompt"] for row in read(tmp_path, "test")] == ["why?"]
    with pytest.raises(BadInput, match=r"has no file of split 'valid', .* it has .*, test\.jsonl; .* evaluation\.sets"):
        read(tmp_path, "valid")


@pytest.mark.parametrize("write", [lines, parquet, saved])
def test_a_column_that_is_not_there_is_named_with_those_that_are(
    write: Callable[[list[dict[str, Any]], Path], Path], tmp_path: Path
) -> None:
    path = write([{"prompt": "why?", "number": 1}], tmp_path / f"rows.{write.__name__}")
    sentence = r"(line|row) 1 is not an object with a 'question'; it has prompt, number; .* as data\.columns\.prompt\."
    with pytest.raises(BadInput, match=sentence):
        read(path)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"question": 1', "line 1 is not a JSON object"),
        ("a.jsonl", "[1]", "line 1 is not a JSON object; write one on every line"),
        ("a.parquet", "none", "cannot be read: .*; write the file again"),
        ("a.arrow", "none", "cannot be read: .*; write the file again"),
    ],
)
def test_a_broken_file_is_told_in_a_sentence(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(BadInput, match=said):
        read(tmp_path / name)


def test_a_split_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(BadInput, match="has no split 'valid'; name one of train, test"):
        read(tmp_path, "valid")


@pytest.mark.parametrize(
    "listed", ['["../../etc/passwd"]', "7", '[{"filename": 1}]', r'["\u0000"]', f'["{"x" * 256}"]']
)
def test_no_list_of_files_leads_out_of_its_directory(tmp_path: Path, listed: str) -> None:
    (tmp_path / "state.json").write_text(f'{{"_data_files": {listed}}}')
    with pytest.raises(BadInput, match="was not written by `datasets`"):
        read(tmp_path)


def test_without_pyarrow_json_lines_are_read_and_others_name_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = parquet([ROW], tmp_path / "rows.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.ipc", None)
    assert len(read(lines([ROW], tmp_path / "rows.jsonl"))) == 1
    with pytest.raises(BadInput, match=r"pyarrow reads \.parquet files and is not installed; pip install"):
        read(table)


def test_what_the_datasets_library_saves_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    known = datasets.Dataset.from_list([{**ROW, "number": number} for number in range(4)])
    parts = {"train": known, "test": known.filter(lambda row: row["number"] > 1)}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "both")
    assert (len(read(tmp_path / "both")), len(read(tmp_path / "both", "test"))) == (4, 2)


@pytest.mark.parametrize("line", ['{"question": "\\ud800"}', "[" * 100_000])
def test_a_line_that_no_text_or_no_end_has_is_told(tmp_path: Path, line: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{line}\n")
    with pytest.raises(BadInput, match=r"rows\.jsonl line 1 (has a lone surrogate|is not a JSON object)"):
        read(tmp_path / "rows.jsonl")


def test_a_line_that_is_too_long_is_refused_before_it_is_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"question": "a", "reward_model": {"ground_truth": ""}}) + "\n" + "x" * (90 * 10**6))
    tracemalloc.start()
    try:
        with pytest.raises(BadInput, match=r"line 2 has more than 16777216 bytes, the most of a line that is read"):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()
