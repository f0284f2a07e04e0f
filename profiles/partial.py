"""A table that is still growing: where it is kept, what it may be continued with, and when it is refused.

It lies beside the table that it will become and is written every few seconds, so that measuring can stop at any time.
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
"""What is lost at most when measuring is cut off; writing takes some ten milliseconds."""


def partial_path(output: Path) -> Path:
    """Where the growing table of `output` is kept."""
    return output.with_name(f"{output.stem}.partial{output.suffix}")


def begun(output: Path, provenance: Provenance, *, fresh: bool) -> Table:
    """What earlier calls measured for `output`, cut off or finished; an empty table when there is none, or if `fresh`.

    The date stays that of the first call. Raises BadInput when they measured elsewhere or with other versions.
    """
    if not fresh:
        for path in (partial_path(output), output):
            if path.exists():
                found = read_table(path)
                _require_same(path, found.provenance, provenance)
                return found
    return Table(provenance=provenance)


def missing(table: Table, wanted: Iterable[K]) -> tuple[K, ...]:
    """The keys for which the table has neither a time nor a failure, in their order."""
    known = {*(m.point for m in table.measurements), *(c.exchange for c in table.collectives)}
    return tuple(key for key in wanted if key not in known)


class PartialTable:
    """A table that grows, written now and then; without a path it is not written. `clock` is in seconds."""

    def __init__(self, table: Table, path: Path | None, *, clock: Callable[[], float]) -> None:
        self._begun, self._path, self._clock = table, path, clock
        self._measurements = {found.point: found for found in table.measurements}
        self._collectives = {found.exchange: found for found in table.collectives}
        self._written = clock()

    def add(self, *found: Measurement | Collective) -> None:
        """Adds what was measured, in place of what was there of it; writes when the last time is long enough ago."""
        self._measurements |= {one.point: one for one in found if isinstance(one, Measurement)}
        self._collectives |= {one.exchange: one for one in found if isinstance(one, Collective)}
        if self._path and self._clock() - self._written >= _SECONDS_BETWEEN_WRITES:
            write_table(self._path, self.table())
            self._written = self._clock()

    def table(self) -> Table:
        """All that is known by now."""
        update = {
            "measurements": tuple(self._measurements.values()),
            "collectives": tuple(self._collectives.values()),
        }
        return Table.model_validate({**dict(self._begun), **update})


def _require_same(path: Path, theirs: Provenance, ours: Provenance) -> None:
    for name, value in ours:
        other = getattr(theirs, name)
        if name != "date" and other != value:
            raise BadInput(
                f"{path} was measured with {name} {_text(other)} and this call has {_text(value)}; "
                "name another output, or start over with --fresh."
            )


def _text(value: object) -> str:
    if value is None:
        return "that are not told"
    return ", ".join(f"{k} {v}" for k, v in sorted(value.items())) if isinstance(value, dict) else str(value)
