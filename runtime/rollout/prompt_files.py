"""Rows of prompts from files: JSON lines, Parquet, and directories of the `datasets` library.

Parquet and Arrow are read with pyarrow, which is optional; `datasets` itself is not needed. Only the named columns of a
row are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwright.profiles.errors import BadInput
from meshwright.profiles.untrusted_text import (
    DuplicateKeyError,
    is_file_name,
    json_value,
    load_json,
    not_utf8,
    read_text,
    require_file,
    require_no_surrogates,
)

_MAX_BYTES = 64 * 2**30
"""Maximum bytes of a Parquet or Arrow file, which is read in batches."""

_MAX_TEXT_BYTES, _MAX_LINE_BYTES = 2**30, 16 * 2**20
"""Maximum bytes of a file of JSON lines, and of one of its lines."""

_SUFFIXES = (".parquet", ".jsonl", ".arrow")
"""Suffixes of the files that a dataset directory may hold."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a file: the values of its columns by Meshwright's names, and its location for error messages."""

    values: Mapping[str, Any]
    place: str


def read_rows(
    path: Path, columns: Mapping[str, str], split: str, optional: Mapping[str, str] | None = None
) -> Iterator[Row]:
    """Yield the rows of a file, or of a split of a directory. `columns` maps Meshwright's names to those of the
    file; a row may lack the columns of `optional`.

    Raises BadInput for a file that does not exist or cannot be read, and for a row without one of the columns.
    """
    optional_columns = optional or {}
    for file in _files(path, split) if path.is_dir() else (path,):
        names = (*columns.values(), *optional_columns.values())
        where, rows = ("line", _json_lines(file)) if _is_text(file) else ("row", _table_rows(file, names))
        for number, row in enumerate(rows, start=1):
            place = f"prompts {file} {where} {number}"
            values = {ours: _value(row, theirs, ours, place) for ours, theirs in columns.items()}
            optional_values = {
                ours: row[theirs] for ours, theirs in optional_columns.items() if row.get(theirs) is not None
            }
            yield Row(values={**values, **optional_values}, place=place)


def _is_text(file: Path) -> bool:
    return file.suffix not in (".parquet", ".arrow")


def _value(row: Any, column: str, ours: str, place: str) -> Any:
    value = row
    for part in column.split("."):
        if not isinstance(value, dict) or part not in value:
            if not isinstance(row, dict):
                raise BadInput(f"{place} is not a JSON object; write one on every line.")
            known = f"; it has {', '.join(map(str, row))}"
            raise BadInput(f"{place} is not an object with a {column!r}{known}; give its name as data.columns.{ours}.")
        value = value[part]
    return value


def _json_lines(path: Path) -> Iterator[Any]:
    """Yield the rows with one line in memory at a time."""
    require_file(path, "prompts", _MAX_TEXT_BYTES)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES + 1), b""), start=1):
                yield _json_line(line.removesuffix(b"\n"), f"prompts {path} line {number}")
    except OSError as error:
        raise BadInput(f"prompts {path} cannot be read: {error}.") from None


def _json_line(line: bytes, place: str) -> Any:
    if len(line) > _MAX_LINE_BYTES:
        raise BadInput(
            f"{place} has more than {_MAX_LINE_BYTES} bytes, the most of a line that is read; shorten it, or take it "
            "out."
        )
    try:
        text = line.decode("utf-8")
        row = load_json(text)
    except UnicodeDecodeError as error:
        raise BadInput(f"{place} {not_utf8(error)}.") from None
    except DuplicateKeyError as error:
        raise BadInput(f"{place}: {error}.") from None
    except (ValueError, RecursionError):
        raise BadInput(f"{place} is not a JSON object; write one on every line.") from None
    return require_no_surrogates(row, text, place)


def _table_rows(path: Path, columns: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows with one batch in memory at a time."""
    require_file(path, "prompts", _MAX_BYTES)
    arrow = _pyarrow(path)
    try:
        if path.suffix == ".parquet":
            table = arrow.parquet.ParquetFile(path)
            names = _columns_to_read(table.schema_arrow.names, columns)
            for batch in table.iter_batches(batch_size=1024, columns=names):
                batch.validate(full=True)
                yield from batch.to_pylist()
        else:
            with arrow.memory_map(str(path)) as source, arrow.ipc.open_stream(source) as batches:
                names = _columns_to_read(batches.schema.names, columns)
                for batch in batches:
                    batch.validate(full=True)
                    yield from batch.select(names).to_pylist()
    except (arrow.ArrowException, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        raise BadInput(f"prompts {path} cannot be read: {reason}; write the file again.") from None


def _columns_to_read(names: list[str], columns: Iterable[str]) -> list[str]:
    """Return the columns to read; all of the file if it lacks one of those named, so that the error can list them."""
    top_level = list(dict.fromkeys(column.partition(".")[0] for column in columns))
    return top_level if set(top_level) <= set(names) else names


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
    """Return the files of a split. Raises BadInput if there are none."""
    if (directory / "dataset_dict.json").exists():
        known = _listed_names(directory / "dataset_dict.json", "splits")
        if split not in known:
            raise BadInput(f"prompts {directory} has no split {split!r}; name one of {', '.join(known)}.")
        directory /= split
    if (directory / "state.json").exists():
        files = _listed_names(directory / "state.json", "_data_files")
        return [directory / name for name in files]
    return _named_files(directory, split)


def _listed_names(path: Path, key: str) -> list[str]:
    """Return the names of files and directories that a metadata file of `datasets` lists, all within the directory."""
    try:
        entries = json_value(read_text(path, "prompts"), "it")[key]
        names = [entry["filename"] if isinstance(entry, dict) else entry for entry in entries]
    except (BadInput, KeyError, TypeError):
        names = [None]
    if not all(is_file_name(name) for name in names):
        raise BadInput(f"prompts {path} was not written by `datasets`; save the dataset to disk again.")
    return names


def _named_files(directory: Path, split: str) -> list[Path]:
    """Return files such as train-00000-of-00002.parquet, train.parquet or train.jsonl, in the directory or in its
    data/."""
    places = (directory, directory / "data")
    files = sorted(file for place in places if place.is_dir() for file in place.iterdir() if file.suffix in _SUFFIXES)
    split_files = [file for file in files if file.name.partition("-")[0].partition(".")[0] == split]
    if not split_files:
        have = f"it has {', '.join(file.name for file in files[:8])}" if files else f"no {', '.join(_SUFFIXES)} file"
        raise BadInput(
            f"prompts {directory} has no file of split {split!r}, as {split}-*.parquet or {split}.jsonl: {have}; name "
            "a file, or another split: data.split, data.held_out_split, or split of a set in evaluation.sets."
        )
    return split_files
