"""Bars on the terminal while searches are under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import Progress, TaskID

from meshwright.runtime.api.planning import Progress as Told


@contextmanager
def progress_bars() -> Iterator[Told]:
    """Shows what it is told on standard error: a bar for each kind of searches, gone when the next one begins."""
    bars: dict[str, tuple[Progress, TaskID]] = {}
    with ExitStack() as shown:

        def tell(what: str, done: int, total: int) -> None:
            if what not in bars:
                shown.close()
                progress = shown.enter_context(Progress(console=Console(stderr=True), transient=True))
                bars[what] = progress, progress.add_task(what, total=total)
            progress, bar = bars[what]
            progress.update(bar, completed=done)

        yield tell
