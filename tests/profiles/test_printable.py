"""What a terminal is given moves nothing on it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshwright.profiles.untrusted_text import has_control_characters, printable


@given(st.text())
def test_nothing_is_hidden_in_what_may_be_printed_and_the_rest_stays(text: str) -> None:
    told = printable(text)
    assert not has_control_characters(told)
    assert "\x1b" not in told
    assert (told == text) is not has_control_characters(text)


def test_a_command_to_a_terminal_is_written_out_and_lines_and_letters_stay() -> None:
    assert printable("A100\x1b[2J\x9b31m\r\u202e") == "A100\\x1b[2J\\x9b31m\\r\\u202e"
    assert printable("Größe\t1\n语言 👩\u200d🔬\xa0|") == "Größe\t1\n语言 👩\u200d🔬\xa0|"
