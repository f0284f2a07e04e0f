from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.command import Call, Outcome, exit_code
from tests.runtime.small_job import write_job


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls the command line and keeps what it printed; no mistake of a user ends in a traceback."""

    def run(*arguments: object) -> Outcome:
        code = exit_code(*arguments)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job for two ranks of this machine, with tiny checkpoints beside it."""
    return write_job(tmp_path_factory.mktemp("job"), num_ranks=2)
