"""The rows of a folder of published measurements, and which files of it are known.

Rows are read, never kept: nothing of them is written into this repository.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator, Mapping
from pathlib import Path

from meshwright.profiles.errors import BadInput, suggestion

Row = Mapping[str, str]

_SUFFIXES = (".csv", ".csv.gz")


class Skip(Exception):  # noqa: N818 - not an error: a row that asks what the cost model is not asked
    """A row that cannot be turned into a question, with the reason that is counted."""


def row_files(directory: Path) -> dict[str, Path]:
    """Files of rows below the folder, by their path in it without suffix. Raises BadInput when there is none."""
    if not directory.is_dir():
        raise BadInput(f"data {directory} is not a folder; give the folder of measurements.")
    found = {_stem(path, directory): path for path in sorted(directory.rglob("*")) if path.name.endswith(_SUFFIXES)}
    if not found:
        raise BadInput(f"data {directory} holds no rows; give a folder with .csv or .csv.gz files.")
    return found


def refuse_unknown(found: Mapping[str, Path], known: set[str]) -> None:
    """Raises BadInput for a file of rows that no set reads."""
    for stem, path in found.items():
        if stem not in known:
            raise BadInput(f"rows file {path} is not known; {suggestion(stem, known)}")


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, by column."""
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.name.endswith(".gz") else content).decode()
    yield from csv.DictReader(text.splitlines())


def number(row: Row, column: str) -> float:
    """The number in a column; skips the row when it was not published."""
    try:
        return float(row[column])
    except (KeyError, ValueError):
        raise Skip(f"{column} not published") from None


def count(row: Row, column: str, default: int | None = None) -> int:
    """The whole number in a column, or `default` where it was not published."""
    if default is not None and row.get(column, "") in ("", "n/a"):
        return default
    return round(number(row, column))


def _stem(path: Path, directory: Path) -> str:
    name = path.relative_to(directory).as_posix()
    return name.removesuffix(".gz").removesuffix(".csv")
