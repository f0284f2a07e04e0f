"""The command line, called in this process."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Protocol
from unittest import mock

import pytest

from meshwright.runtime.cli.main import main


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


class Call(Protocol):
    def __call__(self, *arguments: object) -> Outcome: ...


def exit_code(*arguments: object) -> int:
    """Runs the command line in this process."""
    with mock.patch.object(sys, "argv", ["meshwright", *map(str, arguments)]), pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)
