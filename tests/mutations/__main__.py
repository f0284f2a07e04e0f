"""`python -m tests.mutations` tries the mutations of the list: do the tests notice each of them?"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.mutations.listed import ROOT, TIERS, listed_mutations
from tests.mutations.trying import line, table, try_all


def main() -> int:
    """0 where each mutation is noticed, 1 where one survives, does not apply, or could not be tried."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutations; default all of the tier")
    parser.add_argument("--tier", choices=TIERS, default="check", help="tests that may notice (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree that are tried side by side")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    given = parser.parse_args()
    listed = {one.name: one for one in listed_mutations()}
    if unknown := sorted({*(given.only or ())} - {*listed}):
        parser.error(f"no mutation is named {', '.join(unknown)}")
    tiers = TIERS[: TIERS.index(given.tier) + 1]
    chosen = [one for one in listed.values() if one.tier in tiers and (not given.only or one.name in given.only)]
    with tempfile.TemporaryDirectory(prefix="mutations_") as scratch:
        tried = try_all(
            chosen,
            ROOT,
            Path(scratch),
            tier=given.tier,
            jobs=given.jobs,
            tell=lambda one: sys.stderr.write(f"{line(one)}\n"),
        )
    told = json.dumps([asdict(one) for one in tried], indent=1) if given.json else "\n".join(table(tried))
    sys.stdout.write(f"{told}\n")
    return 0 if all(one.verdict.is_well for one in tried) else 1


if __name__ == "__main__":
    sys.exit(main())
