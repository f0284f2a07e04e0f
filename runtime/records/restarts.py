"""What became of a run that was started again: when, why, what was lost, and under which plan it went on."""

from __future__ import annotations

import json
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from meshwright.profiles.errors import BadInput
from meshwright.profiles.printable import printable
from meshwright.profiles.segments import files_of, lines_of
from meshwright.profiles.values import json_value, read_text

_RESTARTS, _METRICS = "restarts.jsonl", "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class Restart:
    """One of a run. Each node that takes part writes its own, by the same number, counted from 1, over resumes too."""

    number: int
    host: str
    reason: str
    reached: int
    """Steps that were recorded."""
    saved: int
    """Updates that the newest checkpoint had seen, from which it went on."""
    planned_again: str = ""
    """That it went on under another plan, in words; only rank 0 writes this. Without a reason nothing had failed."""

    @property
    def lost(self) -> int:
        """Steps that were done again."""
        return max(0, self.reached - self.saved)

    @property
    def told(self) -> str:
        """In one sentence."""
        why = "; ".join(text for text in (self.reason.rstrip("."), self.planned_again) if text)
        return f"restart {self.number} from step {self.saved}, {self.lost} steps lost: {printable(why)}"


_TYPES = (int, str, str, int, int, str)
"""Of its fields."""


def write_restart(out: Path, restart: Restart) -> None:
    """Appends it to those of a run."""
    with (out / _RESTARTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(restart), sort_keys=True) + "\n")


def read_restarts(out: Path) -> tuple[Restart, ...]:
    """Those of a run, as one for each number: what was lost is what any node saw lost, and all reasons are told."""
    if not (out / _RESTARTS).exists():
        return ()
    found: dict[int, list[Restart]] = {}
    for place, line in enumerate(read_text(out / _RESTARTS, "restarts").split("\n")[:-1], start=1):
        one = _restart(line, f"{out / _RESTARTS} line {place}")
        found.setdefault(one.number, []).append(one)
    return tuple(_merged(of_nodes) for _, of_nodes in sorted(found.items()))


def steps_recorded(out: Path) -> int:
    """The steps whose metrics a run has written."""
    return sum(1 for line in lines_of(*files_of(out / _METRICS)) if line.is_whole)


def _restart(line: str, told: str) -> Restart:
    try:
        one = Restart(**json_value(line, told))
    except TypeError:
        raise BadInput(f"{told} is no restart; if the file is damaged, delete that line.") from None
    if not all(isinstance(value, field_type) for value, field_type in zip(astuple(one), _TYPES, strict=True)):
        raise BadInput(f"{told} is no restart; if the file is damaged, delete that line.")
    return one


def _merged(of_nodes: list[Restart]) -> Restart:
    first = of_nodes[0]
    reasons = dict.fromkeys(one.reason.rstrip(".") for one in of_nodes if one.reason)
    return Restart(
        number=first.number,
        host=", ".join(dict.fromkeys(one.host for one in of_nodes)),
        reason="; ".join(reasons),
        reached=max(one.reached for one in of_nodes),
        saved=max(one.saved for one in of_nodes),
        planned_again=next((one.planned_again for one in of_nodes if one.planned_again), ""),
    )
