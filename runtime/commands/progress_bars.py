"""Progress bars of searches on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import Progress, TaskID

from meshwright.runtime.api.planning import Progress as Report


@contextmanager
def progress_bars() -> Iterator[Report]:
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
