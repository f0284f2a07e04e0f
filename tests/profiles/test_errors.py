"""Every error of a user has its exit code, and an unknown name comes with the nearest known ones."""

import pytest

from meshwright.profiles.errors import BadInput, Infeasible, MeshwrightError, RunFailed, suggestion

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
