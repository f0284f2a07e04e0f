from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from meshwright.runtime.explorer.searches import Searches
from meshwright.runtime.explorer.server import ExplorerServer
from meshwright.runtime.explorer.source import read_source


@contextmanager
def explored(path: Path, *, gap: float | None = 0.3) -> Iterator[ExplorerServer]:
    """A server that answers, with its searches in a thread."""
    source = read_source(path, gap=gap)
    searches = Searches(source, limit_memory=nullcontext)
    server = ExplorerServer(source, searches)
    threads = [threading.Thread(target=target, daemon=True) for target in (server.serve_forever, searches.serve)]
    for thread in threads:
        thread.start()
    try:
        yield server
    finally:
        searches.close()
        server.shutdown()
        server.server_close()
        for thread in threads:
            thread.join(60)


@pytest.fixture(scope="module")
def server(job: Path) -> Iterator[ExplorerServer]:
    """The explorer of the small job."""
    with explored(job) as found:
        yield found
