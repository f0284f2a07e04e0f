"""Bars are told of what is searched, and stand on standard error alone."""

from __future__ import annotations

import pytest

from meshwright.runtime.commands.progress_bars import progress_bars


def test_what_is_told_changes_nothing_of_the_answer_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bars() as tell:
        for done in range(3):
            tell("searching without each choice", done, 2)
        tell("planning other sizes", 1, 1)
    assert capsys.readouterr().out == ""


def search_that_fails() -> None:
    with progress_bars() as tell:
        tell("searching", 0, 1)
        raise KeyError("gone")


def test_an_error_inside_passes_and_leaves_no_bar_running() -> None:
    with pytest.raises(KeyError, match="gone"):
        search_that_fails()
    with progress_bars() as tell:
        tell("searching", 1, 1)
