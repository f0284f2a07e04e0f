"""Measures what this machine's GPU makes of the runtime, part by part, in calls of under ten minutes each.

    python -m benchmarks.accelerator --out DIR [--device h200] [--minutes 9.5] [--part PART ...]
    python -m benchmarks.accelerator --out DIR --device cpu --tiny

A part that is finished is not measured again: say the same command until it says that nothing is left, or take out its
entry in DIR/state.json. Each part's report is DIR/<part>.md. With --device cpu --tiny every part runs on a processor,
with models of two layers: a trial of the commands, whose figures are of no GPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.accelerator.finished import Finished
from benchmarks.accelerator.parts import PARTS
from benchmarks.arguments import one_of
from meshwright.profiles.errors import BadInput

_ROOT = Path(__file__).parents[2]
_SECONDS_TO_END = 20.0
_TINY_SHARE = 0.3
"""Of a part's time, that it takes with models of two layers."""


def main() -> int:
    """The exit code: 0, 2 for what cannot be measured here, or 1 where a part failed or was cut off."""
    parts = "\n".join(f"  {name:14}{part.about}; {part.minutes:g} minutes at most" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accelerator",
        description=f"{__doc__}\nparts, in their order:\n{parts}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="directory for models, profiles, runs and reports")
    parser.add_argument("--device", default="h200", help="the GPU of this machine, as jobs name it, or cpu")
    parser.add_argument("--tiny", action="store_true", help="models of two layers, to try the commands")
    parser.add_argument("--minutes", type=float, default=9.5, help="that this call may take")
    parser.add_argument("--part", action="append", type=one_of(PARTS), help="this alone; may be given again")
    asked = parser.parse_args()
    try:
        return _measure(asked)
    except BadInput as problem:
        print(f"error: {problem}", file=sys.stderr)
        return problem.exit_code


def _measure(asked: argparse.Namespace) -> int:
    """Begins every part that fits into what is left of the call, at least one."""
    if asked.device == "cpu" and not asked.tiny:
        raise BadInput("--device cpu: models of real sizes take a processor days; add --tiny to try the commands.")
    out: Path = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    finished = Finished(out, f"{asked.device}{', tiny' if asked.tiny else ''}")
    ends, begun, code = time.monotonic() + 60 * asked.minutes, 0, 0
    wanted = [name for name in PARTS if name in (asked.part or PARTS) and name not in finished]
    for name in wanted:
        left = ends - time.monotonic()
        if begun and left < 60 * PARTS[name].minutes * (_TINY_SHARE if asked.tiny else 1):
            continue
        begun += 1
        code |= not _run(name, asked, out, left, finished)
    print(_what_next(asked, [name for name in PARTS if name not in finished], out))
    return code


def _run(name: str, asked: argparse.Namespace, out: Path, seconds: float, finished: Finished) -> bool:
    """Measures one part within so many seconds; whether it is finished."""
    print(f"\n## {name}\n", flush=True)
    command = [sys.executable, "-m", "benchmarks.accelerator.parts", name, "--out", str(out), "--device", asked.device]
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if asked.device == "cpu" else {})}
    began = time.monotonic()
    process = subprocess.Popen(
        command + ["--tiny"] * asked.tiny, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        report, _ = process.communicate(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        _end(process)
        print(f"cut off after {time.monotonic() - began:.0f} s: {name} is begun again in the next call", flush=True)
        return False
    if process.returncode:
        print(f"failed with code {process.returncode}", flush=True)
        return False
    print(report, flush=True)
    finished.add(name, report, time.monotonic() - began)
    return True


def _end(process: subprocess.Popen[str]) -> None:
    """Asks it to end, with the ranks that it started, and does not wait for long."""
    process.terminate()
    try:
        process.communicate(timeout=_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _what_next(asked: argparse.Namespace, left: list[str], out: Path) -> str:
    if left:
        return f"\nleft: {', '.join(left)}; say the same command again"
    if asked.tiny:
        return f"\nnothing is left. Tiny models: nothing in {out} is a figure of a GPU; delete it."
    return (
        f"\nnothing is left: copy {out}/profiles/*.json to profiles/data/{asked.device}/ and the reports, {out}/*.md, "
        "to benchmarks/accelerator/ with machine and date in their names; say in docs/status.md what is measured"
    )


if __name__ == "__main__":
    sys.exit(main())
