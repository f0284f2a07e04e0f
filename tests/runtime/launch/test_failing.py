"""A rank that cannot go on says why where somebody looks, and takes what is silent with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.profiles.errors import BadInput, RunFailed
from meshwright.runtime.launch import failure_records

ENDS = "import sys; from pathlib import Path; from meshwright.runtime.launch import failure_records; "


def test_an_error_leaves_its_record(tmp_path: Path) -> None:
    failure_records.set_record_path(tmp_path / "0.json")
    try:
        failure_records.write_record(ValueError("a surprise"))
        told = json.loads((tmp_path / "0.json").read_text())
        assert (told["sentence"], told["is_bad_input"], told["is_of_all"]) == ("ValueError: a surprise", False, False)
        failure_records.write_record(BadInput("give another"))
        told = json.loads((tmp_path / "0.json").read_text())
        assert (told["sentence"], told["is_bad_input"]) == ("give another", True)
    finally:
        failure_records._record_paths.clear()


def test_a_rank_that_ends_itself_prints_where_nobody_reads_its_record() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", f"{ENDS}failure_records.end_process('all is lost')"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (4, "error: all is lost\n")


def test_a_rank_that_ends_itself_leaves_a_record_of_all_and_nothing_silent(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as silent:
        script = (
            f"{ENDS}failure_records.set_record_path(Path(sys.argv[1])); "
            f"failure_records.end_process('lost', [{silent.pid}])"
        )
        command = [sys.executable, "-c", script, str(tmp_path / "1.json")]
        assert subprocess.run(command, check=False).returncode == 4
        assert silent.wait(10) == -9
    told = json.loads((tmp_path / "1.json").read_text())
    assert (told["sentence"], told["is_of_all"]) == ("lost", True)


def test_a_rank_that_is_ended_while_it_writes_leaves_no_half_of_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text[:10].encode(encoding))
        raise KeyboardInterrupt

    failure_records.set_record_path(tmp_path / "1.json")
    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(KeyboardInterrupt):
        failure_records.write_record(RunFailed("a disk is full."))
    failure_records._record_paths.clear()
    assert list(tmp_path.glob("*.json")) == []
