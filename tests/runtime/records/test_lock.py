"""One run at a time in a directory, until its process ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from meshwright.profiles.errors import BadInput
from meshwright.runtime.records import run_directory
from meshwright.runtime.records.run_directory import is_locked, locked, require_unlocked


def test_a_directory_is_held_by_one_process_until_it_ends_in_whatever_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "WAIT_SECONDS", 0.1)
    script = (
        "import sys, time; from pathlib import Path; from meshwright.runtime.records.run_directory import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        for taken in (lambda: locked(tmp_path).__enter__(), lambda: require_unlocked(tmp_path)):
            with pytest.raises(BadInput, match="is in use by a run that has not ended"):
                taken()
        other.kill()
    require_unlocked(tmp_path)
    with locked(tmp_path):
        pass


def test_a_directory_without_a_lock_is_free_and_asking_leaves_nothing(tmp_path: Path) -> None:
    require_unlocked(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_given_back_when_its_run_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a surprise"), locked(tmp_path):
        raise ValueError("a surprise")
    require_unlocked(tmp_path)


def test_a_pipe_in_the_place_of_the_lock_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.lock")
    with pytest.raises(BadInput, match=r"the lock of a run .* is a device or a pipe"):
        require_unlocked(tmp_path)


def test_a_run_that_is_being_ended_is_waited_for_and_who_only_asks_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_directory, "_SILENT_SECONDS", 0.2)
    held, waiting = threading.Event(), threading.Event()

    def hold() -> None:
        with locked(tmp_path):
            held.set()
            waiting.wait(10)
            time.sleep(0.5)

    other = threading.Thread(target=hold)
    other.start()
    assert held.wait(10)
    start = time.monotonic()
    assert is_locked(tmp_path)
    assert time.monotonic() - start < 0.2
    waiting.set()
    require_unlocked(tmp_path)
    with locked(tmp_path):
        pass
    other.join()
    assert f"waiting for the run in {tmp_path} to end" in capsys.readouterr().err
