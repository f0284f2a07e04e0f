"""Differences between two documents, key by key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel


class Difference(NamedTuple):
    """A dotted key and its values in both documents; None if a document lacks the key."""

    key: str
    one: Any
    other: Any

    def describe(self, one: str, other: str) -> str:
        """Return a clause that states the difference, with the names of both documents."""
        return f"{self.key} is {_limited_repr(self.one)} in {one} and {_limited_repr(self.other)} in {other}"


def differences(one: BaseModel, other: BaseModel) -> tuple[Difference, ...]:
    """Return all leaves in which the documents differ, in key order. A list is one leaf."""
    return tuple(_differences(one.model_dump(mode="json"), other.model_dump(mode="json")))


def _differences(one: Any, other: Any, *keys: str) -> Iterator[Difference]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            yield from _differences(one.get(key), other.get(key), *keys, key)
    elif one != other:
        yield Difference(".".join(keys), one, other)


def _limited_repr(value: Any) -> str:
    text = "not given" if value is None else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
