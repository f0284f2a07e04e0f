"""Scores the cost model against a folder of published measurements.

python -m benchmarks.fidelity --data DIR [--data DIR] [--set NAME] [--worst] [--json]

Rows of several folders are scored together, so that a row may have its partner in another folder. Experts are scored
against what aiconfigurator-core carries, where that is installed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.fidelity.sets import scores_of, set_names, unread
from benchmarks.fidelity.show import as_json, show
from meshwright.profiles.errors import BadInput

_NUM_WORST = 10


def main() -> int:
    """The exit code: 0, or 2 for a folder that cannot be scored."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        action="append",
        help="folder of rows, in the format of the README there; may be repeated",
    )
    parser.add_argument("--set", action="append", choices=set_names(), help="score only this set; may be repeated")
    parser.add_argument("--worst", action="store_true", help=f"also the {_NUM_WORST} worst rows of each set")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    num_worst = _NUM_WORST if arguments.worst else 0
    try:
        for sentence in unread(arguments.data):
            print(f"note: {sentence}", file=sys.stderr)
        scores = scores_of(arguments.data, arguments.set, installed=True)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if arguments.json:
        print(as_json(scores, num_worst=num_worst))
    else:
        show(scores, num_worst=num_worst)
    return 0


sys.exit(main())
