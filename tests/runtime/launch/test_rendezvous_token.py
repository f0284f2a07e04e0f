"""A token comes from a file of the user's own or from the environment, and a seal under it holds for one text."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.profiles.errors import BadInput
from meshwright.runtime.launch.rendezvous_token import VARIABLE, opened, read_token, sealed

TOKEN = "0123456789abcdef"


def test_a_file_is_before_the_environment_and_neither_is_no_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    assert read_token(path, {VARIABLE: "x" * 16}) == TOKEN
    assert read_token(None, {VARIABLE: "x" * 16}) == "x" * 16
    assert read_token(None, {}) == ""


def test_a_token_that_others_can_read_or_guess_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o640)
    with pytest.raises(BadInput, match=r"can be read by others; make it yours alone: chmod 600"):
        read_token(path)
    with pytest.raises(BadInput, match=f"{VARIABLE} has 5 characters, fewer than 16"):
        read_token(None, {VARIABLE: "short"})
    with pytest.raises(BadInput, match="does not exist"):
        read_token(tmp_path / "none")


def test_a_text_is_opened_with_its_own_token_and_as_it_was_sealed() -> None:
    message = sealed("node 1", TOKEN)
    assert opened(message, TOKEN) == opened(message.encode(), TOKEN) == "node 1"
    assert opened(message, TOKEN.upper()) is None
    assert opened(message.replace("node 1", "node 2"), TOKEN) is None
