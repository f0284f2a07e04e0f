"""Partial profile tables, which make profiling resumable.

A partial table lies beside the final one and is written every few seconds, so that profiling can be interrupted at any
time. It is resumed only with the same provenance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from meshwright.profiles.errors import BadInput
from meshwright.profiles.table import (
    Collective,
    Exchange,
    Measurement,
    Point,
    Provenance,
    Table,
    read_table,
    write_table,
)

K = TypeVar("K", Point, Exchange)

_SECONDS_BETWEEN_WRITES = 2.0
"""Upper bound on the seconds of measurements lost on interruption; a write takes some 10 ms."""


def partial_path(output: Path) -> Path:
    """Return the path of the partial table of `output`."""
    return output.with_name(f"{output.stem}.partial{output.suffix}")


def resume_table(output: Path, provenance: Provenance, *, fresh: bool) -> Table:
    """Return the table that earlier calls measured for `output`, partial or complete; empty if none, or with `fresh`.

    The date remains that of the first call. Raises BadInput if the provenance of that table differs otherwise.
    """
    if not fresh:
        for path in (partial_path(output), output):
            if path.exists():
                table = read_table(path)
                _require_same(path, table.provenance, provenance)
                return table
    return Table(provenance=provenance)


def missing_keys(table: Table, keys: Iterable[K]) -> tuple[K, ...]:
    """Return the keys for which the table has neither a time nor a failure, in order."""
    known = {*(m.point for m in table.measurements), *(c.exchange for c in table.collectives)}
    return tuple(key for key in keys if key not in known)


class PartialTable:
    """A table that is filled and written periodically; without a path it is not written. `clock` is in seconds."""

    def __init__(self, table: Table, path: Path | None, *, clock: Callable[[], float]) -> None:
        self._initial, self._path, self._clock = table, path, clock
        self._measurements = {one.point: one for one in table.measurements}
        self._collectives = {one.exchange: one for one in table.collectives}
        self._written_at = clock()

    def add(self, *measurements: Measurement | Collective) -> None:
        """Add or replace measurements, and write the table if the last write is long enough ago."""
        self._measurements |= {one.point: one for one in measurements if isinstance(one, Measurement)}
        self._collectives |= {one.exchange: one for one in measurements if isinstance(one, Collective)}
        if self._path and self._clock() - self._written_at >= _SECONDS_BETWEEN_WRITES:
            write_table(self._path, self.table())
            self._written_at = self._clock()

    def table(self) -> Table:
        """Return the table with all measurements so far."""
        update = {
            "measurements": tuple(self._measurements.values()),
            "collectives": tuple(self._collectives.values()),
        }
        return Table.model_validate({**dict(self._initial), **update})


def _require_same(path: Path, recorded: Provenance, current: Provenance) -> None:
    for name, value in current:
        measured = getattr(recorded, name)
        if name != "date" and measured != value:
            raise BadInput(
                f"{path} was measured with {name} {_text(measured)} and this call has {_text(value)}; "
                "name another output, or start over with --fresh."
            )


def _text(value: object) -> str:
    if value is None:
        return "that were not recorded"
    return ", ".join(f"{k} {v}" for k, v in sorted(value.items())) if isinstance(value, dict) else str(value)
