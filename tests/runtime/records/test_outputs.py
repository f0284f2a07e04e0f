"""What a command may write over: nothing of a user's is lost, whatever is named as its output."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.planner.plan.plan import write_plan
from meshwright.profiles.documents import write_atomically
from meshwright.profiles.errors import BadInput
from meshwright.runtime.records.outputs import Output, OutputKind, require_outputs
from tests.runtime.cli.test_report_command import small_plan
from tests.runtime.command import Call


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    write_plan(path, small_plan(1))
    return path


@pytest.fixture
def mine(job: Path, tmp_path: Path) -> Path:
    """A copy of the job that a test may lose."""
    return shutil.copytree(job.parent, tmp_path / "job") / job.name


def refused(call: Call, *arguments: object) -> str:
    outcome = call(*arguments)
    assert outcome.code == 2
    (sentence,) = outcome.err.splitlines()
    return sentence


@pytest.mark.parametrize("way", ["itself", "symbolic", "hard"])
def test_an_output_that_is_an_input_is_refused_by_whatever_name(call: Call, mine: Path, way: str) -> None:
    before, output = mine.read_bytes(), mine
    if way != "itself":
        output = mine.with_name("other")
        (output.symlink_to if way == "symbolic" else output.hardlink_to)(mine)
    assert "is also read by this command" in refused(call, "plan", mine, "-o", output)
    assert "is also read by this command" in refused(call, "profile", mine, "-o", output)
    assert mine.read_bytes() == before


def test_only_a_document_of_the_same_kind_is_replaced(call: Call, job: Path, plan: Path, tmp_path: Path) -> None:
    mine = tmp_path / "thesis.json"
    mine.write_text('{"title": "mine"}')
    timeline, page = tmp_path / "timeline.json", tmp_path / "page.html"
    assert call("simulate", plan, "--steps", 1, "--trace", timeline).code == 0
    assert call("report", plan, "--steps", 1, "-o", page).code == 0
    assert call("simulate", plan, "--steps", 1, "--trace", timeline).code == 0
    assert call("report", plan, "--steps", 1, "-o", page).code == 0
    assert "exists and is not a plan, so it is not replaced" in refused(call, "plan", job, "-o", mine)
    for other in (mine, timeline):
        assert "exists and is not a Meshwright HTML page" in refused(call, "report", plan, "-o", other, "--steps", 1)
    for other in (mine, page):
        assert "exists and is not a timeline" in refused(call, "simulate", plan, "--trace", other)
    assert mine.read_text() == '{"title": "mine"}'


def test_each_kind_is_known_by_what_is_written(call: Call, job: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert call("plan", job, "-o", path).code == 0
    assert call("plan", job, "-o", path).code == 0
    assert OutputKind.PLAN.begins(path.read_text())
    assert not OutputKind.TABLE.begins(path.read_text())


@pytest.mark.parametrize("name", ["/dev/full", "/dev/null"])
def test_a_device_is_refused_and_stays_one(call: Call, job: Path, plan: Path, name: str) -> None:
    before = os.stat(name).st_mode
    for arguments in (("plan", job, "-o"), ("report", plan, "-o"), ("simulate", plan, "--trace")):
        assert "is a device or a pipe" in refused(call, *arguments, name)
    assert os.stat(name).st_mode == before


def test_writing_refuses_a_device_even_if_nobody_asked_before(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is no file and is not replaced"):
        write_atomically(Path("/dev/full"), "text")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="is no file"):
        write_atomically(tmp_path / "pipe", "text")


def test_writing_to_a_link_leaves_the_link(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "there"]


@pytest.mark.parametrize("name", [".", "..", "/", "folder", "plan.json/x", "/proc/x/y", "a" * 300])
def test_what_is_no_file_in_a_directory_is_refused_before_work_begins(
    call: Call, job: Path, plan: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(plan.parent)
    Path("folder").mkdir()
    for arguments in (("plan", job, "-o"), ("report", plan, "-o"), ("simulate", plan, "--trace")):
        assert "; name " in refused(call, *arguments, name)


def test_two_outputs_are_two_files(call: Call, plan: Path, tmp_path: Path) -> None:
    sentence = refused(call, "report", plan, "-o", tmp_path / "x.html", "--trace", tmp_path / "." / "x.html")
    assert "are the same file; name two." in sentence


def test_a_rehearsal_takes_no_directory_that_holds_something(call: Call, plan: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "plan.json").write_text("mine")
    assert "holds files, and nothing is overwritten" in refused(call, "rehearse", plan, "--out", tmp_path / "out")
    assert "is not a directory" in refused(call, "rehearse", plan, "--out", plan)


def test_a_disk_that_takes_no_more_is_one_sentence(call: Call, plan: Path) -> None:
    script = "from meshwright.runtime.cli.main import main; main()"
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", script, "simulate", plan, "--steps", "1"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 4
    assert ended.stderr.startswith("error: cannot write")
    assert ended.stderr.count("\n") == 1


def test_a_link_in_a_circle_is_no_output_of_a_command_that_reads_it(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    require_outputs(Output("-o", tmp_path / "plan.json", OutputKind.PLAN), inputs=[tmp_path / "circle"])
