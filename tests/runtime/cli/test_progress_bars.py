"""Bars are shown on standard error while there is something to count, one kind of searches at a time."""

from __future__ import annotations

import pytest

from meshwright.runtime.cli.call import progress_bars


def shown(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that a terminal was sent."""
    captured = capfd.readouterr()
    assert captured.out == ""
    return captured.err.split("\r")


def test_nothing_is_shown_where_nothing_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_bars():
        pass
    assert shown(capfd) == [""]


def test_a_bar_is_gone_when_the_next_kind_of_searches_begins(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the stream for a terminal
    with progress_bars() as tell:
        for done in range(3):
            tell("one kind", done, 2)
        tell("another kind", 0, 1)
    lines = shown(capfd)
    assert any("one kind" in line and "100%" in line for line in lines)
    assert any("another kind" in line and "0%" in line for line in lines)
    assert not any("one kind" in line and "another kind" in line for line in lines)
    assert lines[-1].endswith("\x1b[2K")  # the last bar is wiped away
