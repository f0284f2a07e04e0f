"""Which vulnerabilities are known of the pinned packages, by the records that pip-audit reads: those of PyPI.

An index that keeps no records of single releases tells those of each package's newest release only; what is said of a
pin then is what is said of the newest, where it is the newest.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_INDEX = "https://pypi.org/pypi"
_SECONDS = 30.0
_PINS = Path(__file__).parents[2] / "constraints.txt"


@dataclass(frozen=True, kw_only=True)
class Audited:
    """A pinned package: the release that the record is of, and what is known of that one; none where none was told."""

    name: str
    pinned: str
    recorded: str | None
    known: tuple[str, ...]

    @property
    def is_told(self) -> bool:
        """Whether the record is of the pinned release."""
        return self.recorded == self.pinned


def pins(text: str) -> list[tuple[str, str]]:
    """Names and releases of a file of constraints."""
    lines = (line.split("#")[0].split(";")[0].strip() for line in text.splitlines())
    return [(name, release) for line in lines if line for name, release in [line.split("==")]]


def audited(name: str, pinned: str, records: Iterable[dict[str, Any]]) -> Audited:
    """By the first record of the pinned release, or else the last one."""
    recorded, known = None, ()
    for record in records:
        recorded, known = record["info"]["version"], tuple(one["id"] for one in record["vulnerabilities"])
        if recorded == pinned:
            break
    return Audited(name=name, pinned=pinned, recorded=recorded, known=known)


def measure() -> list[Audited]:
    """Asks about every pin; raises URLError where there is no network."""
    return [audited(*pin, _records(*pin)) for pin in pins(_PINS.read_text())]


def _records(name: str, release: str) -> Iterable[dict[str, Any]]:
    for path in (f"{name}/{release}", name):
        try:
            with urllib.request.urlopen(f"{_INDEX}/{path}/json", timeout=_SECONDS) as answer:
                yield json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise


def report(found: Sequence[Audited]) -> str:
    """How many pins are told to be free of what is known, and every other one."""
    told = [one for one in found if one.is_told]
    lines = [
        f"{len(found)} pinned packages. Of {len(told)} the pinned release has a record: "
        f"{sum(not one.known for one in told)} without a known vulnerability.",
        "",
        "| package | pinned | record of | known of that |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {one.name} | {one.pinned} | {one.recorded or 'none'} | {', '.join(one.known) or 'nothing'} |"
        for one in found
        if one.known or not one.is_told
    ]
    return "\n".join(lines)
