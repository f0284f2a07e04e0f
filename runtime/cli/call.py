"""Functions that the commands share: they read the files of --profile and --from-trace, limit the memory of planning,
stop a search on Ctrl-C and SIGTERM, and show progress on standard error.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from meshwright.profiles.errors import BadInput, Infeasible
from meshwright.profiles.table import Table, read_table
from meshwright.profiles.workload import ObservedLengths
from meshwright.runtime.api.planning import Progress as ReportProgress
from meshwright.runtime.cli.options import DurationsFrom


def read_profile(profile: Path | None) -> Table | None:
    """Read the table of --profile; None without the option."""
    return read_table(profile) if profile else None


def read_profile_for(durations: DurationsFrom, profile: Path | None) -> Table | None:
    """Read the table of --profile if lengths are sampled; planned durations need none."""
    return read_profile(profile) if durations is DurationsFrom.SAMPLED else None


FromTrace = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN_DIR|FILE.jsonl",
        help="Take lengths, turns and latencies from a run, or from JSON lines with one rollout each.",
    ),
]
TraceFields = Annotated[
    list[str] | None,
    typer.Option(
        "--trace-field",
        help="A key of the --from-trace file, as response=completion_length; for prompt, response, result and latency.",
    ),
]


def read_lengths(trace: Path | None, fields: list[str] | None) -> ObservedLengths | None:
    """Read the lengths of --from-trace, if it is given. Raises BadInput for --trace-field without it."""
    if trace is None:
        if fields:
            raise BadInput("--trace-field names keys of the file of --from-trace; give --from-trace too.")
        return None
    from meshwright.planner.analysis.observed_lengths import parse_fields  # noqa: PLC0415 - rarely needed
    from meshwright.runtime.api.job_inputs import observed_lengths  # noqa: PLC0415

    return observed_lengths(trace, parse_fields(fields or ()))


_MEMORY_SHARE = 0.75
"""Default limit as a share of the available memory; the rest is for other programs."""
_CHECK_SECONDS = 0.25
"""Seconds of processor time between two checks."""


@contextmanager
def limit_memory(max_bytes: float | None = None) -> Iterator[None]:
    """Raises Infeasible in the with block once this process and its children take `max_bytes` more than at its start.

    The default is three quarters of the memory that is available now. Call it in the main thread.
    """
    limit_bytes = _MEMORY_SHARE * psutil.virtual_memory().available if max_bytes is None else max_bytes
    bytes_before = _resident_bytes()

    def check(_signal: int, _frame: FrameType | None) -> None:
        if _resident_bytes() - bytes_before > limit_bytes:
            raise Infeasible(
                f"no plan was found within {limit_bytes / 2**30:.1f} GiB, a share of this machine's free memory; plan "
                "on a larger machine, or for fewer ranks or a smaller batch."
            )

    old_handler = signal.signal(signal.SIGVTALRM, check)
    signal.setitimer(signal.ITIMER_VIRTUAL, _CHECK_SECONDS, _CHECK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, old_handler)


def _resident_bytes() -> int:
    """Resident bytes of this process and its children."""
    own_process = psutil.Process()
    total = 0
    for process in (own_process, *own_process.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_REPEAT_SECONDS = 1.0
"""A signal within this time after the first is the same request: timeout(1) sends each signal twice."""


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """Yield an event that the first signal sets; a later signal raises KeyboardInterrupt. Main thread only."""
    stop, first_signal = threading.Event(), time.monotonic()

    def handle_signal(_signal: int, _frame: FrameType | None) -> None:
        nonlocal first_signal
        if not stop.is_set():
            first_signal = time.monotonic()
            stop.set()
        elif time.monotonic() - first_signal > _REPEAT_SECONDS:
            raise KeyboardInterrupt

    old_handlers = {number: signal.signal(number, handle_signal) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


@contextmanager
def progress_bars() -> Iterator[ReportProgress]:
    """Yield a callback that shows progress on standard error, one bar per kind of search; the next one replaces it."""
    bars: dict[str, tuple[Progress, TaskID]] = {}
    with ExitStack() as stack:

        def report(title: str, done: int, total: int) -> None:
            if title not in bars:
                stack.close()
                progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
                bars[title] = progress, progress.add_task(title, total=total)
            progress, bar = bars[title]
            progress.update(bar, completed=done)

        yield report
