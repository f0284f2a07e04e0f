"""Fits the constants of one law to named rows, and prints them as lines of the data file that holds them.

    python -m benchmarks.fidelity.fit --data DIR --law gemm --of hopper

A law has few constants and many rows: half of the rows, told by a hash of what they say, are fitted; the error on the
other half is printed beside. The files are edited by hand, with the date, so that a change of a constant is a reviewed
one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from benchmarks.fidelity.installed import rows_of
from benchmarks.fidelity.laws import LAWS, Asked, Law
from benchmarks.fidelity.rows import MissingColumn, Row, Skip, row_files
from benchmarks.fidelity.simplex import minimise
from meshwright.profiles.documents import Document
from meshwright.profiles.errors import BadInput

D = TypeVar("D", bound=Document)

_MAX_ROWS = 1500
"""Rows that are fitted; more change the constants by less than their spread over seeds."""


def main() -> int:
    """The exit code: 0, or 2 for a folder or a name that is not known."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity.fit", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--law", choices=sorted(LAWS), required=True)
    parser.add_argument("--of", required=True, help="the family of devices, the framework or the engine that is fitted")
    parser.add_argument("--rounds", type=int, default=150, help="steps of the simplex")
    arguments = parser.parse_args()
    try:
        return _print_fit(arguments.law, arguments.of, arguments.data, arguments.rounds)
    except BadInput as problem:
        print(f"error: {problem}", file=sys.stderr)
        return problem.exit_code


def _print_fit(name: str, owner: str, directory: Path, rounds: int) -> int:
    law = LAWS[name]
    start = law.start(owner)
    halves: tuple[list[Asked], list[Asked]] = ([], [])
    for row, asked in _asked(law, owner, directory):
        halves[is_kept(row)].append(asked)
    random.Random(0).shuffle(halves[0])
    fitted, kept = halves[0][:_MAX_ROWS], halves[1]
    found = fit(law.constants, fitted, start, rounds=rounds)
    for constant in law.constants:
        print(f"    {constant}: {_value(found.model_dump(), constant):.4g}")
    for what, rows in (("fitted", fitted), ("kept", kept)):
        print(f"# {what}: {len(rows)} rows, mean error {error(rows, start):.4f} before, {error(rows, found):.4f} after")
    return 0


def is_kept(row: Row) -> bool:
    """Whether a row is kept aside, never fitted: the same row always is, wherever it stands in a file."""
    text = json.dumps(sorted(row.items()))
    return hashlib.sha256(text.encode()).digest()[0] % 2 == 1


def fit(constants: Sequence[str], rows: Sequence[Asked], start: D, *, rounds: int) -> D:
    """The constants that minimise the mean absolute logarithm of predicted over measured."""

    def with_values(values: NDArray[np.float64]) -> D:
        tree = start.model_dump(mode="json")
        for constant, value in zip(constants, values.tolist(), strict=True):
            _set_value(tree, constant, value)
        return type(start).model_validate_json(json.dumps(tree))

    def loss(values: NDArray[np.float64]) -> float:
        try:
            document = with_values(values)
        except ValidationError:
            return float("inf")
        return float(np.mean([abs(np.log(predict(document) / measured)) for predict, measured in rows]))

    first = [_value(start.model_dump(), constant) for constant in constants]
    best, _ = minimise(loss, first, rounds=rounds)
    return with_values(best)


def error(rows: Sequence[Asked], document: Document) -> float:
    """Mean absolute relative error."""
    return float(np.mean([abs(predict(document) / measured - 1) for predict, measured in rows]))


def _value(tree: Any, constant: str) -> float:
    for part in constant.split("."):
        tree = tree[int(part)] if part.isdigit() else tree[part]
    return float(tree)


def _set_value(tree: Any, constant: str, value: float) -> None:
    *path, last = constant.split(".")
    for part in path:
        tree = tree[int(part)] if part.isdigit() else tree[part]
    tree[last] = value


def _asked(law: Law, owner: str, directory: Path) -> Iterator[tuple[Row, Asked]]:
    files = row_files((directory,))
    stated = ((stem, row) for stem in law.stems(owner) for row in rows_of(stem, files))
    for stem_of_row, row in law.joined(stated):
        try:
            yield row, law.ask(stem_of_row, row)
        except MissingColumn:
            raise
        except (Skip, BadInput):
            continue


if __name__ == "__main__":
    sys.exit(main())
