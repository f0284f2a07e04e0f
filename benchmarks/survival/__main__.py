"""What a run survives, and what that costs.

    python -m benchmarks.survival matrix --out benchmarks/survival/matrix_<cpu>_<date>.md
    python -m benchmarks.survival kills
    python -m benchmarks.survival saves
    python -m benchmarks.survival memory --steps 3000
    python -m benchmarks.survival logs --gib 1.2
    python -m benchmarks.survival hangs
    python -m benchmarks.survival asynchrony
    python -m benchmarks.survival nodes
    python -m benchmarks.survival dependencies
    python -m benchmarks.survival documents --files 40000 --keep survived-not

`matrix` saves a run under each of eight plans and resumes it under each of them; `kills` kills ranks at 60 seeded
moments, synchronous and at staleness 2; `saves` measures what a checkpoint behind every step costs; `memory` runs
the smallest job for long and says what every rank holds at its end; `logs` reads and resumes a run whose trace is
long; `hangs` has a rank hang wherever it can;
`asynchrony` runs four plans at three bounds on the staleness three times each, with delays everywhere, and says what
it costs that they learn the same; `nodes` takes one of two nodes away; `dependencies`
asks PyPI what is known of the pinned packages; `documents` gives mutated files of every kind
to the commands that read them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TypeAlias

from benchmarks.survival import (
    asynchrony,
    asynchrony_cost,
    dependencies,
    documents,
    hangs,
    hostile_world,
    kills,
    logs,
    matrix,
    memory,
    nodes,
    saves,
)

Measured: TypeAlias = tuple[str, bool]
"""A table of Markdown, and whether all that was asked holds."""


def _matrix(_: argparse.Namespace, scratch: Path) -> Measured:
    pairs = matrix.measure(scratch)
    return matrix.report(pairs), all(pair.holds for pair in pairs)


def _kills(asked: argparse.Namespace, scratch: Path) -> Measured:
    found = kills.measure(scratch, num_kills=asked.kills, kills_per_run=5, steps=16)
    return kills.report(found), all(one.holds for one in found)


def _saves(_: argparse.Namespace, scratch: Path) -> Measured:
    return saves.report(saves.measure(scratch, steps=12, repeats=3, hidden_size=256)), True


def _memory(asked: argparse.Namespace, scratch: Path) -> Measured:
    ranks = memory.measure(scratch, steps=asked.steps)
    return memory.report(ranks), all(one.holds for one in ranks)


def _logs(asked: argparse.Namespace, scratch: Path) -> Measured:
    found = logs.measure(scratch, trace_bytes=round(asked.gib * 2**30))
    return logs.report(found), found.holds


def _hangs(_: argparse.Namespace, scratch: Path) -> Measured:
    named = [*hangs.measure(scratch)]
    return hangs.report(named), all(one.holds for one in named)


def _asynchrony(_: argparse.Namespace, scratch: Path) -> Measured:
    repeated, cost = [*asynchrony.measure(scratch)], asynchrony_cost.measure(scratch)
    told = f"{asynchrony.report(repeated)}\n\n{asynchrony_cost.report(cost)}"
    return told, all(one.holds for one in (*repeated, cost))


def _nodes(_: argparse.Namespace, scratch: Path) -> Measured:
    lost = nodes.measure(scratch)
    return nodes.report(lost), lost.holds


def _dependencies(*_: object) -> Measured:
    found = dependencies.measure()
    return dependencies.report(found), not any(one.known for one in found if one.is_told)


def _documents(asked: argparse.Namespace, scratch: Path) -> Measured:
    hostile_world.write(scratch / "world")
    tried = documents.measure(
        scratch / "world", asked.keep, number=asked.files, num_workers=asked.workers, seed=asked.seed
    )
    return documents.report(tried), tried.holds


_MEASURES = {
    "matrix": _matrix,
    "kills": _kills,
    "saves": _saves,
    "memory": _memory,
    "logs": _logs,
    "hangs": _hangs,
    "asynchrony": _asynchrony,
    "nodes": _nodes,
    "dependencies": _dependencies,
    "documents": _documents,
}


def main() -> int:
    """The exit code: 0, or 1 where something did not survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=tuple(_MEASURES))
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--steps", type=int, default=3000, help="of the long run")
    parser.add_argument("--gib", type=float, default=1.2, help="of trace, uncompressed")
    parser.add_argument("--files", type=int, default=40_000, help="that are mutated")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="that read them")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations")
    parser.add_argument("--keep", type=Path, default=Path("findings"), help="where files that were not survived go")
    parser.add_argument("--out", type=Path, help="where the report goes; printed in any case")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        text, holds = _MEASURES[asked.what](asked, Path(scratch))
    told = f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores\n\n{text}\n"
    print(told)
    if asked.out:
        asked.out.write_text(f"# Survival: {asked.what}\n\n{told}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
