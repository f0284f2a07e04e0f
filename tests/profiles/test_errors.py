"""Of several violations the first is told, and later ones are not even looked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshwright.profiles.errors import BadInput, require_none


def violations() -> Iterator[str]:
    yield "tp=3 does not divide it; use 2."
    raise AssertionError("nobody needs the second one")


@pytest.mark.parametrize(("of", "told"), [("plan", "plan: tp=3 does"), ("", "tp=3 does")])
def test_the_first_violation_is_told_with_what_it_is_of(of: str, told: str) -> None:
    with pytest.raises(BadInput, match=rf"^{told} not divide it; use 2\.$"):
        require_none(violations(), of)


def test_what_has_no_violation_passes() -> None:
    require_none((), "plan")
