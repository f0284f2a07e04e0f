"""Sizes are whole numbers between commas, each once."""

from __future__ import annotations

import pytest

from meshwright.profiles.errors import BadInput
from meshwright.runtime.cli.options import parse_sizes


def test_sizes_are_read_in_their_order_and_each_once() -> None:
    assert parse_sizes("16,8, 32,8") == (16, 8, 32)
    assert parse_sizes(None) == ()


@pytest.mark.parametrize("text", ["", "8,", "8,,16", "eight", "1.5", "8;16"])
def test_what_is_no_list_of_whole_numbers_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="is not a list of whole numbers; write it like 8,16,32"):
        parse_sizes(text)


def test_no_more_sizes_are_taken_than_can_be_searched() -> None:
    many = ",".join(map(str, range(1, 66)))
    assert len(parse_sizes(many.rpartition(",")[0])) == 64
    with pytest.raises(BadInput, match="--sizes has 65 numbers, and each takes a search; give 64 at most"):
        parse_sizes(many)
