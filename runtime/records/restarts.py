"""Stops and restarts of a run: the cause, the number of lost steps, and the plan under which it continued."""

from __future__ import annotations

import json
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from meshwright.profiles.errors import BadInput
from meshwright.profiles.run_logs import log_files, read_log_lines
from meshwright.profiles.untrusted_text import json_value, printable, read_text

NEXT_PLAN = "next_plan.json"
"""File in the directory of a run that has stopped to change its plan; it holds the plan under which it continues."""


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """A run that has stopped before its last step."""

    done: int
    """Number of updates after which it stopped."""
    saved: int | None
    """Number of updates in its newest checkpoint."""
    continues: bool = False
    """True if it stopped by itself, to continue under the plan in `NEXT_PLAN`."""


_RESTARTS, _METRICS = "restarts.jsonl", "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class Restart:
    """A restart of a run. Every node writes one, under the same number, counted from 1 across resumes."""

    number: int
    host: str
    reason: str
    reached: int
    """Steps recorded before the restart."""
    saved: int
    """Number of updates in the checkpoint from which the run continued."""
    replan_note: str = ""
    """Message about the other plan under which it continued, if any, written by rank 0; `reason` is empty unless the
    run failed."""

    @property
    def lost(self) -> int:
        """Number of steps that ran again."""
        return max(0, self.reached - self.saved)

    @property
    def message(self) -> str:
        """The restart as a message."""
        why = "; ".join(text for text in (self.reason.rstrip("."), self.replan_note) if text)
        return f"restart {self.number} from step {self.saved}, {self.lost} steps lost: {printable(why)}"


_TYPES = (int, str, str, int, int, str)
"""Types of the fields of Restart."""


def write_restart(out: Path, restart: Restart) -> None:
    """Append a restart to those of a run."""
    with (out / _RESTARTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(restart), sort_keys=True) + "\n")


def read_restarts(out: Path) -> tuple[Restart, ...]:
    """Return the restarts of a run; the nodes' entries for one restart are merged into one, with all reasons."""
    if not (out / _RESTARTS).exists():
        return ()
    by_number: dict[int, list[Restart]] = {}
    for number, line in enumerate(read_text(out / _RESTARTS, "restarts").split("\n")[:-1], start=1):
        one = _restart(line, f"{out / _RESTARTS} line {number}")
        by_number.setdefault(one.number, []).append(one)
    return tuple(_merged(node_entries) for _, node_entries in sorted(by_number.items()))


def steps_recorded(out: Path) -> int:
    """Return the number of steps whose metrics a run has written."""
    return sum(1 for line in read_log_lines(*log_files(out / _METRICS)) if line.is_complete)


def _restart(line: str, label: str) -> Restart:
    try:
        one = Restart(**json_value(line, label))
    except TypeError:
        raise BadInput(f"{label} is not a restart; if the file is damaged, delete that line.") from None
    if not all(isinstance(value, field_type) for value, field_type in zip(astuple(one), _TYPES, strict=True)):
        raise BadInput(f"{label} is not a restart; if the file is damaged, delete that line.")
    return one


def _merged(node_entries: list[Restart]) -> Restart:
    first = node_entries[0]
    reasons = dict.fromkeys(one.reason.rstrip(".") for one in node_entries if one.reason)
    return Restart(
        number=first.number,
        host=", ".join(dict.fromkeys(one.host for one in node_entries)),
        reason="; ".join(reasons),
        reached=max(one.reached for one in node_entries),
        saved=max(one.saved for one in node_entries),
        replan_note=next((one.replan_note for one in node_entries if one.replan_note), ""),
    )
