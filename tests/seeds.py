"""Cases of a law: a few of them in every check, all of them in `make check-all`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def seeds(few: int, *, all: int, failed: Sequence[int] = ()) -> pytest.MarkDecorator:
    """Parametrises a test by `seed`, from 0 to `all` - 1, of which `make check` runs the first `few`.

    `failed` holds seeds that once found a fault: they belong to the few.
    """
    return cases("seed", range(all), few=(*range(few), *failed))


def cases(
    names: str | tuple[str, ...], values: Iterable[Any], *, few: int | Iterable[Any], **options: Any
) -> pytest.MarkDecorator:
    """Parametrises a test as `pytest.mark.parametrize` does; `make check` runs the few alone.

    `few` is how many of the first values those are, or the values themselves.
    """
    every = list(values)
    chosen = every[:few] if isinstance(few, int) else list(few)
    assert 0 < len(chosen) <= len(every)
    assert all(value in every for value in chosen), f"{chosen} are not all among the values of {names}"
    several = not isinstance(names, str)
    parameters = [
        value if value in chosen else pytest.param(*(value if several else (value,)), marks=pytest.mark.check_all)
        for value in every
    ]
    return pytest.mark.parametrize(names, parameters, **options)
