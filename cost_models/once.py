"""Answers that are computed once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Once(Generic[K, T]):
    """The answers to one question, by what they depend on. An answer is never None."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[K, T] = {}

    def of(self, key: K, make: Callable[[], T]) -> T:
        """What `make` answered when this key was first asked about."""
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = make()
        return known
