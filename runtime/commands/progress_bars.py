"""Progress bars of searches on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import Progress, TaskID

from meshwright.runtime.api.planning import Progress as Told


@contextmanager
def progress_bars() -> Iterator[Told]:
    """Yield a callback that shows progress on standard error, one bar per kind of search; the next one replaces it."""
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
