"""A pin is free of what is known only by a record of its own release."""

from __future__ import annotations

from typing import Any

from benchmarks.survival.dependencies import audited, pins, report


def record(release: str, *known: str) -> dict[str, Any]:
    return {"info": {"version": release}, "vulnerabilities": [{"id": one} for one in known]}


def test_the_record_of_the_pinned_release_comes_before_that_of_the_newest() -> None:
    found = audited("a", "1.0", [record("1.0", "PYSEC-1"), record("2.0")])
    assert (found.recorded, found.known, found.is_told) == ("1.0", ("PYSEC-1",), True)


def test_of_an_older_pin_the_newest_release_tells_nothing() -> None:
    assert not audited("a", "1.0", [record("2.0")]).is_told
    assert not audited("a", "1.0", []).is_told


def test_what_is_known_and_what_is_not_told_are_listed() -> None:
    found = [audited("a", "1", [record("1")]), audited("b", "1", [record("1", "X-1")]), audited("c", "1", [])]
    text = report(found)
    assert "3 pinned packages. Of 2 the pinned release has a record: 1 without" in text
    assert "| b | 1 | 1 | X-1 |" in text
    assert "| c | 1 | none | nothing |" in text
    assert "| a |" not in text


def test_pins_are_read_without_markers_and_notes() -> None:
    assert pins("# all\na==1.2\nb==3; python_version < '3.12'\n\n") == [("a", "1.2"), ("b", "3")]
