"""The rows of a folder of published measurements, and which files of it are known.

Rows are read, never kept: nothing of them is written into this repository.
"""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

from meshwright.profiles.errors import BadInput, suggestion

Row = Mapping[str, str]

RowFiles = Mapping[str, tuple[Path, ...]]
"""Files of rows by name, of one folder or of several."""

T = TypeVar("T")

_SUFFIXES = (".csv", ".csv.gz")


class MissingColumn(BadInput):
    """A file whose rows lack what the format says they have."""


class _Columns(dict[str, str]):
    """A row of a file, which says what is missing where a column is."""

    def __init__(self, path: Path, row: Mapping[str, str]) -> None:
        super().__init__(row)
        self._path = path

    def __missing__(self, column: str) -> str:
        raise MissingColumn(f"rows file {self._path} has no column {column}; give a file in the format of its README.")


class Skip(Exception):  # noqa: N818 - not an error: a row that asks what the cost model is not asked
    """A row that cannot be turned into a question, with the reason that is counted."""


def row_files(folders: Sequence[Path]) -> RowFiles:
    """Files of rows below the folders, by their path in their folder without suffix.

    A name that several folders have stands for the rows of all of them. Raises BadInput for a folder without rows.
    """
    found: dict[str, tuple[Path, ...]] = {}
    for folder in folders:
        if not folder.is_dir():
            raise BadInput(f"data {folder} is not a folder; give the folder of measurements.")
        paths = [path for path in sorted(folder.rglob("*")) if path.name.endswith(_SUFFIXES)]
        if not paths:
            raise BadInput(f"data {folder} holds no rows; give a folder with .csv or .csv.gz files.")
        for path in paths:
            stem = _stem(path, folder)
            found[stem] = (*found.get(stem, ()), path)
    return found


def unknown(found: RowFiles, known: Sequence[str]) -> Iterator[str]:
    """A sentence for each file of rows that no set reads; names may hold a * for what differs from file to file."""
    for stem, paths in found.items():
        if not matching((stem,), known):
            for path in paths:
                yield f"rows file {path} is not known and not read; {suggestion(stem, known)}"


def matching(stems: Iterable[str], names: Sequence[str]) -> tuple[str, ...]:
    """The files that have one of these names, in the order of the names."""
    there = sorted(stems)
    return tuple(dict.fromkeys(stem for name in names for stem in there if fnmatchcase(stem, name)))


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, by column."""
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.name.endswith(".gz") else content).decode()
    for row in csv.DictReader(text.splitlines(), restval=""):
        yield _Columns(path, row)


def number(row: Row, column: str, *, zero: bool = False) -> float:
    """The number in a column; skips the row when it was not published, or is none that can be meant."""
    try:
        found = float(row[column])
    except ValueError:
        raise Skip(f"{column} not published") from None
    if not (0 < found < math.inf or (zero and found == 0)):
        raise Skip(f"{column} of {row[column]}")
    return found


def count(row: Row, column: str, default: int | None = None, *, zero: bool = False) -> int:
    """The whole number in a column, or `default` where it was not published."""
    if default is not None and row.get(column, "") in ("", "n/a"):
        return default
    return math.ceil(number(row, column, zero=zero))


def stated(row: Row, *columns: str) -> str:
    """What the first of these columns that the row's file has says; files of the format differ in names."""
    return row[next((column for column in columns if column in row), columns[-1])]


def looked_up(known: Mapping[str, T], value: str, what: str) -> T:
    """What a row calls `value`; skips the row when it is not known here."""
    if value not in known:
        raise Skip(f"{what} {value} not known" if value else f"{what} not published")
    return known[value]


def _stem(path: Path, directory: Path) -> str:
    name = path.relative_to(directory).as_posix()
    return name.removesuffix(".gz").removesuffix(".csv")
