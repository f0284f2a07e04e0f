"""Every error of a user has its exit code, and an unknown name comes with the nearest known ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshwright.profiles.errors import (
    BadInput,
    Infeasible,
    MeshwrightError,
    RunFailed,
    nearest,
    require_none,
    suggestion,
)

KNOWN = ("actor_train", "actor_logprob", "critic_train")


def test_every_kind_of_error_has_an_exit_code_of_its_own() -> None:
    kinds = (MeshwrightError, BadInput, Infeasible, RunFailed)
    assert [kind.exit_code for kind in kinds] == [1, 2, 3, 4]
    assert set(MeshwrightError.__subclasses__()) == set(kinds[1:])


@pytest.mark.parametrize(
    ("unknown", "told"),
    [
        ("actor", "did you mean 'actor_logprob' or 'actor_train'?"),
        ("critic_trian", "did you mean 'critic_train'?"),
        ("zebra", "known: actor_logprob, actor_train, critic_train."),
        ("", "known: actor_logprob, actor_train, critic_train."),
    ],
)
def test_a_name_is_told_what_it_begins_or_what_it_is_near_or_all_there_are(unknown: str, told: str) -> None:
    assert suggestion(unknown, KNOWN) == told


def violations() -> Iterator[str]:
    yield "tp=3 does not divide it; use 2."
    raise AssertionError("nobody needs the second one")


@pytest.mark.parametrize(("of", "told"), [("plan", "plan: tp=3 does"), ("", "tp=3 does")])
def test_the_first_violation_is_told_with_what_it_is_of(of: str, told: str) -> None:
    with pytest.raises(BadInput, match=rf"^{told} not divide it; use 2\.$"):
        require_none(violations(), of)


def test_what_has_no_violation_passes() -> None:
    require_none((), "plan")


def test_the_nearest_value_is_the_smaller_of_two_as_near() -> None:
    assert [nearest(value, (1, 2, 4, 8)) for value in (0, 3, 5, 6, 90)] == [1, 2, 4, 4, 8]
