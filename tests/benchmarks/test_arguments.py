"""Names given to the commands under benchmarks/."""

import argparse

import pytest

from benchmarks.arguments import one_of


def test_a_known_name_is_taken_as_it_is() -> None:
    assert one_of(("tiny", "deep"))("deep") == "deep"


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"'7b-16' is not known; did you mean '7b-16xa100'\?"):
        one_of(("7b-16xa100", "tiny"))("7b-16")
