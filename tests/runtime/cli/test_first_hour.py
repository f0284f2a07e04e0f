"""What a new user gets wrong in a first hour is answered in one sentence that says what to do instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import typer

from meshwright.runtime.cli import main
from tests.runtime.command import Call
from tests.runtime.first_hour import EDITED_JOBS, MISTAKES, MISTAKES_WITH_A_PLAN, prepare, prepare_plan


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("first-hour")
    prepare(directory)
    return directory


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """The command line is put together once for all, in the directory of the documents."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(main, "app", typer.main.get_command(main.app))


def unlike(call: Call, mistakes: Mapping[str, str]) -> Iterator[str]:
    """The command lines that are not refused in one sentence with the words that say what to do."""
    for command, way_out in mistakes.items():
        outcome = call(*command.split())
        sentence = outcome.err.rstrip("\n")
        if outcome.code != 2 or "\n" in sentence or way_out not in sentence or sentence[-1] not in ".?`":
            yield f"{command}: {outcome.code}, {sentence} {outcome.out[:100]}"


def test_there_are_more_than_a_hundred() -> None:
    assert len(MISTAKES | MISTAKES_WITH_A_PLAN | EDITED_JOBS) > 100


@pytest.mark.usefixtures("ready")
def test_a_wrong_command_line_is_answered_with_the_right_one(call: Call) -> None:
    assert list(unlike(call, MISTAKES)) == []


@pytest.mark.usefixtures("ready")
def test_a_wrong_job_is_answered_with_what_to_write(call: Call) -> None:
    assert list(unlike(call, EDITED_JOBS)) == []


@pytest.mark.check_all
@pytest.mark.usefixtures("ready")
def test_a_wrong_question_about_a_plan_is_answered_with_a_right_one(call: Call, place: Path) -> None:
    prepare_plan(place)
    assert list(unlike(call, MISTAKES_WITH_A_PLAN)) == []
