"""Arguments of the commands here that name one of several known things."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

from meshwright.profiles.errors import suggestion


def one_of(known: Iterable[str]) -> Callable[[str], str]:
    """The `type` of an argument that may be given any number of times, which `choices` of argparse does not allow."""
    names = tuple(known)

    def name(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not known; {suggestion(text, names)}")
        return text

    return name
