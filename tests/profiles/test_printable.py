"""What a terminal is given moves nothing on it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshwright.profiles.untrusted_text import has_control_characters, limited, printable, without_long_words


@given(st.text())
def test_nothing_is_hidden_in_what_may_be_printed_and_the_rest_stays(text: str) -> None:
    told = printable(text)
    assert not has_control_characters(told)
    assert "\x1b" not in told
    assert (told == text) is not has_control_characters(text)


def test_a_command_to_a_terminal_is_written_out_and_lines_and_letters_stay() -> None:
    assert printable("A100\x1b[2J\x9b31m\r\u202e") == "A100\\x1b[2J\\x9b31m\\r\\u202e"
    assert printable("Größe\t1\n语言 👩\u200d🔬\xa0|") == "Größe\t1\n语言 👩\u200d🔬\xa0|"


def test_the_middle_of_a_long_word_is_left_out() -> None:
    path = "/".join(["directory"] * 25)
    assert without_long_words(f"{path} is not here") == f"{path} is not here"
    assert without_long_words(f"a={'y' * 5000}: it is no number") == (
        f"a={'y' * 78}...(5,003 characters)...{'y' * 19}: it is no number"
    )


def test_a_long_text_is_limited_to_its_beginning() -> None:
    assert limited("x" * 60) == "x" * 60
    assert limited("x" * 61) == "x" * 57 + "..."
