"""Which parts of a benchmark are finished, kept beside their reports, so that no call measures one again."""

from __future__ import annotations

import json
from pathlib import Path

from meshwright.profiles.documents import write_atomically
from meshwright.profiles.errors import BadInput

_FILE = "state.json"


class Finished:
    """`measured` says on what and at which size; a directory holds reports of one such alone."""

    def __init__(self, out: Path, measured: str) -> None:
        """Raises BadInput for a directory whose parts were measured otherwise."""
        self._path, self._measured = out / _FILE, measured
        self._seconds: dict[str, float] = {}
        if self._path.exists():
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            if kept["measured"] != measured:
                raise BadInput(
                    f"--out {out} holds parts measured on {kept['measured']}, not on {measured}; give another."
                )
            self._seconds = kept["seconds"]

    def __contains__(self, part: str) -> bool:
        return part in self._seconds

    def report_of(self, part: str) -> Path:
        """Where its report is."""
        return self._path.parent / f"{part}.md"

    def add(self, part: str, report: str, seconds: float) -> None:
        """Keeps a report, and then that it is there."""
        write_atomically(self.report_of(part), f"# {part}\n\n{report}")
        self._seconds[part] = seconds
        kept = {"measured": self._measured, "seconds": self._seconds}
        write_atomically(self._path, json.dumps(kept, indent=2))
