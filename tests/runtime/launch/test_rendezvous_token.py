"""A token comes from a file of the user's own or from the environment, and a seal under it holds for one text."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.profiles.errors import BadInput
from meshwright.runtime.launch.rendezvous import TOKEN_VARIABLE, open_sealed, read_token, seal

TOKEN = "0123456789abcdef"


def test_a_file_is_before_the_environment_and_neither_is_no_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    assert read_token(path, {TOKEN_VARIABLE: "x" * 16}) == TOKEN
    assert read_token(None, {TOKEN_VARIABLE: "x" * 16}) == "x" * 16
    assert read_token(None, {}) == ""


def test_a_token_that_others_can_read_or_guess_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o640)
    with pytest.raises(BadInput, match=r"can be read by others; make it yours alone: chmod 600"):
        read_token(path)
    with pytest.raises(BadInput, match=f"{TOKEN_VARIABLE} has 5 characters, fewer than 16"):
        read_token(None, {TOKEN_VARIABLE: "short"})
    with pytest.raises(BadInput, match="does not exist"):
        read_token(tmp_path / "none")


def test_a_text_is_opened_with_its_own_token_and_as_it_was_sealed() -> None:
    message = seal("node 1", TOKEN)
    assert open_sealed(message, TOKEN) == open_sealed(message.encode(), TOKEN) == "node 1"
    assert open_sealed(message, TOKEN.upper()) is None
    assert open_sealed(message.replace("node 1", "node 2"), TOKEN) is None
