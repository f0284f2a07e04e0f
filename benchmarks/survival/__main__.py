"""What a run survives, and what that costs.

    python -m benchmarks.survival matrix --out benchmarks/survival/matrix_<cpu>_<date>.md
    python -m benchmarks.survival kills
    python -m benchmarks.survival saves

`matrix` saves a run under each of eight plans and resumes it under each of them; `kills` kills ranks at 60 seeded
moments, synchronous and at staleness 2; `saves` measures what a checkpoint behind every step costs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.survival import kills, matrix, saves


def main() -> int:
    """The exit code: 0, or 1 where something did not survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("matrix", "kills", "saves"))
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--out", type=Path, help="where the report goes; printed in any case")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        text, holds = _measured(asked.what, Path(scratch), asked.kills)
    told = f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores\n\n{text}\n"
    print(told)
    if asked.out:
        asked.out.write_text(f"# Survival: {asked.what}\n\n{told}")
    return 0 if holds else 1


def _measured(what: str, scratch: Path, num_kills: int) -> tuple[str, bool]:
    if what == "matrix":
        pairs = matrix.measure(scratch)
        return matrix.report(pairs), all(pair.holds for pair in pairs)
    if what == "kills":
        found = kills.measure(scratch, num_kills=num_kills, kills_per_run=5, steps=16)
        return kills.report(found), all(one.holds for one in found)
    return saves.report(saves.measure(scratch, steps=12, repeats=3, hidden_size=256)), True


if __name__ == "__main__":
    sys.exit(main())
