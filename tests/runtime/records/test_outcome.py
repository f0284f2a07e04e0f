"""What a turn left on a rank goes to rank 0 as it is, and is read without torch."""

from __future__ import annotations

import subprocess
import sys

from meshwright.profiles.trace import Span
from meshwright.runtime.messages.transport import pack, unpack
from meshwright.runtime.records.results import PeriodResult


def test_an_outcome_is_the_same_after_a_message() -> None:
    span = Span(
        step=2,
        instruction="actor_train",
        kind="stage",
        rank=1,
        start_seconds=0.5,
        end_seconds=1.5,
        clock="measured",
        facts={"num_tokens": 7.0},
    )
    told = PeriodResult(period=2, spans=(span,), overhead=0.25, metrics={"actor_train": {"policy_loss": -0.125}})
    assert unpack(pack(told)) == told


def test_records_are_read_without_torch() -> None:
    script = "import sys, meshwright.runtime.records.record; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
