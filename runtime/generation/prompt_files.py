"""Rows of prompts in the files that people have: JSON lines, Parquet, and directories of the `datasets` library.

Parquet and Arrow are read with pyarrow, which is optional; `datasets` itself is not needed. Of every row only the
columns that are named are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwright.profiles.errors import BadInput
from meshwright.profiles.values import (
    DoubledKeyError,
    is_file_name,
    json_value,
    load_json,
    read_text,
    require_file,
    whole_characters,
)

_MOST_BYTES = 64 * 2**30
"""Of a file of which a part is in memory at a time."""

_MOST_TEXT_BYTES, _MOST_LINE_BYTES = 2**30, 16 * 2**20
"""Of a file of JSON lines, and of one of its lines."""

_SUFFIXES = (".parquet", ".jsonl", ".arrow")
"""Of the files that a directory of a hub may hold."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a file: the values of its columns by our names, and where a sentence says that it stands."""

    values: Mapping[str, Any]
    place: str


def read_rows(
    path: Path, columns: Mapping[str, str], split: str, optional: Mapping[str, str] | None = None
) -> Iterator[Row]:
    """The rows of a file, or of a split of a directory, one after another; `columns` are their names by ours, as are
    those that are `optional`.

    Raises BadInput for what does not exist or cannot be read, and for a row without one of the columns.
    """
    more = optional or {}
    for file in _files(path, split) if path.is_dir() else (path,):
        wanted = (*columns.values(), *more.values())
        where, rows = ("line", _json_lines(file)) if _is_text(file) else ("row", _table_rows(file, wanted))
        for number, row in enumerate(rows, start=1):
            place = f"prompts {file} {where} {number}"
            values = {ours: _value(row, theirs, ours, place) for ours, theirs in columns.items()}
            there = {ours: row[theirs] for ours, theirs in more.items() if row.get(theirs) is not None}
            yield Row(values={**values, **there}, place=place)


def _is_text(file: Path) -> bool:
    return file.suffix not in (".parquet", ".arrow")


def _value(row: Any, column: str, ours: str, place: str) -> Any:
    found = row
    for part in column.split("."):
        if not isinstance(found, dict) or part not in found:
            known = f"; it has {', '.join(map(str, row))}" if isinstance(row, dict) else ""
            raise BadInput(
                f"{place} is not an object with a {column!r}{known}; say what the column is called as "
                f"data.columns.{ours}."
            )
        found = found[part]
    return found


def _json_lines(path: Path) -> Iterator[Any]:
    """A line in memory at a time."""
    require_file(path, "prompts", _MOST_TEXT_BYTES)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MOST_LINE_BYTES + 1), b""), start=1):
                yield _json_line(line.removesuffix(b"\n"), f"prompts {path} line {number}")
    except OSError as error:
        raise BadInput(f"prompts {path} cannot be read: {error}.") from None


def _json_line(line: bytes, place: str) -> Any:
    if len(line) > _MOST_LINE_BYTES:
        raise BadInput(
            f"{place} has more than {_MOST_LINE_BYTES} bytes, the most of a line that is read; shorten it, or take it "
            "out."
        )
    try:
        text = line.decode("utf-8")
        row = load_json(text)
    except UnicodeDecodeError as error:
        raise BadInput(f"{place} cannot be read: {error}.") from None
    except DoubledKeyError as error:
        raise BadInput(f"{place}: {error}.") from None
    except (ValueError, RecursionError):
        raise BadInput(f"{place} is not a JSON object; write one on every line.") from None
    return whole_characters(row, text, place)


def _table_rows(path: Path, columns: Iterable[str]) -> Iterator[dict[str, Any]]:
    """A batch of rows in memory at a time."""
    require_file(path, "prompts", _MOST_BYTES)
    arrow = _pyarrow(path)
    try:
        if path.suffix == ".parquet":
            table = arrow.parquet.ParquetFile(path)
            wanted = _known(table.schema_arrow.names, columns)
            for batch in table.iter_batches(batch_size=1024, columns=wanted):
                batch.validate(full=True)
                yield from batch.to_pylist()
        else:
            with arrow.memory_map(str(path)) as source, arrow.ipc.open_stream(source) as batches:
                wanted = _known(batches.schema.names, columns)
                for batch in batches:
                    batch.validate(full=True)
                    yield from batch.select(wanted).to_pylist()
    except (arrow.ArrowException, OSError, ValueError) as error:
        told = (str(error).splitlines() or [""])[0].rstrip(".")
        raise BadInput(f"prompts {path} cannot be read: {told}; write the file anew.") from None


def _known(names: list[str], columns: Iterable[str]) -> list[str]:
    """Those of the columns that a file has; all where it lacks one, so that they can be told."""
    wanted = list(dict.fromkeys(column.partition(".")[0] for column in columns))
    return wanted if set(wanted) <= set(names) else names


def _pyarrow(path: Path) -> ModuleType:
    try:
        import pyarrow.ipc  # noqa: PLC0415 - the package may be missing
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError:
        raise BadInput(
            f"prompts {path}: pyarrow reads {path.suffix} files and is not installed; pip install 'meshwright[data]', "
            "or give JSON lines."
        ) from None
    module: ModuleType = pyarrow
    return module


def _files(directory: Path, split: str) -> list[Path]:
    """Those of a split. Raises BadInput where there are none."""
    if (directory / "dataset_dict.json").exists():
        known = _listed(directory / "dataset_dict.json", "splits")
        if split not in known:
            raise BadInput(f"prompts {directory} has no split {split!r}; name one of {', '.join(known)}.")
        directory /= split
    if (directory / "state.json").exists():
        files = _listed(directory / "state.json", "_data_files")
        return [directory / name for name in files]
    return _named_files(directory, split)


def _listed(path: Path, key: str) -> list[str]:
    """Names of files and directories that a small file of `datasets` lists; none leads out of the directory."""
    try:
        found = json_value(read_text(path, "prompts"), "it")[key]
        names = [one["filename"] if isinstance(one, dict) else one for one in found]
    except (BadInput, KeyError, TypeError):
        names = [None]
    if not all(is_file_name(name) for name in names):
        raise BadInput(f"prompts {path} is none that `datasets` writes; save the dataset to disk again.")
    return names


def _named_files(directory: Path, split: str) -> list[Path]:
    """Files as train-00000-of-00002.parquet, train.parquet or train.jsonl, there or under data/."""
    places = (directory, directory / "data")
    files = sorted(file for place in places if place.is_dir() for file in place.iterdir() if file.suffix in _SUFFIXES)
    found = [file for file in files if file.name.partition("-")[0].partition(".")[0] == split]
    if not found:
        there = f"it has {', '.join(file.name for file in files[:8])}" if files else f"no {', '.join(_SUFFIXES)} file"
        raise BadInput(
            f"prompts {directory} has no file of split {split!r}, as {split}-*.parquet or {split}.jsonl: {there}; name "
            "a file, or the split as data.split or data.held_out_split."
        )
    return found
