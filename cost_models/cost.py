"""A cost is a sum of named terms, in seconds or bytes, each with the source of its number."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Generic, TypeAlias

import numpy as np

from meshwright.profiles.elementwise import BoolArray, N, sum_of


class Source(StrEnum):
    """The source of a number, from the most to the least trusted."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    ANALYTIC = "analytic"
    EXTRAPOLATED = "extrapolated"


WEIGHTS = "weights"
"""Name of the term for a weight copy; stages that share one copy count it once."""

_RANK = {source: rank for rank, source in enumerate(Source)}


def least_trusted(sources: Iterable[Source]) -> Source:
    """Return the source to report for a number computed from several; MEASURED if there are none."""
    return max(sources, key=_RANK.__getitem__, default=Source.MEASURED)


def source_where(condition: bool | BoolArray, one: Source, other: Source) -> Source:
    """Return the source of `where` on two amounts; the less trusted one for an array of choices."""
    if isinstance(condition, np.ndarray):
        return least_trusted([one, other])
    return one if condition else other


@dataclass(frozen=True)
class Term:
    """A named part of a cost, in seconds or bytes like the cost."""

    name: str
    amount: float
    source: Source = Source.ANALYTIC

    def scaled(self, factor: float) -> Term:
        return Term(self.name, self.amount * factor, self.source)


@dataclass(frozen=True)
class Cost:
    """A sum of terms, all in seconds or all in bytes."""

    terms: tuple[Term, ...] = ()

    @cached_property
    def total(self) -> float:
        return math.fsum([term.amount for term in self.terms])

    @property
    def source(self) -> Source:
        """The least trusted source among the terms; a cost without terms is exact."""
        return least_trusted(term.source for term in self.terms)

    def amount(self, *names: str) -> float:
        """Return the sum of the terms with these names."""
        return sum([term.amount for term in self.terms if term.name in names])

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.terms + other.terms)

    def scaled(self, factor: float) -> Cost:
        return Cost(tuple(term.scaled(factor) for term in self.terms))

    def merged(self) -> Cost:
        """Return the cost with terms of the same name and source added together, in order of first appearance."""
        amounts: dict[tuple[str, Source], float] = {}
        for term in self.terms:
            key = (term.name, term.source)
            amounts[key] = amounts.get(key, 0.0) + term.amount
        return Cost(tuple(Term(name, amount, source) for (name, source), amount in amounts.items()))


Addend: TypeAlias = tuple[str, N, Source]
"""The name, amount and source of a term: of one choice (`Addend[float]`), or of several, [choices]."""


class TermSums(Generic[N]):
    """Accumulates amounts by name, of one choice or of several; a term has the least trusted source of its addends."""

    def __init__(self) -> None:
        self._addends: dict[str, tuple[N, Source]] = {}

    def add(self, name: str, amount: N, source: Source = Source.ANALYTIC) -> None:
        if isinstance(amount, np.ndarray) or amount:
            current = self._addends.get(name)
            if current is None:
                self._addends[name] = amount, source
            else:
                worse = source if _RANK[source] > _RANK[current[1]] else current[1]
                self._addends[name] = current[0] + amount, worse

    @property
    def total(self) -> N:
        return sum_of(self.amounts)

    @property
    def amounts(self) -> list[N]:
        """The amounts of the terms, in order of first addition."""
        return [amount for amount, _ in self._addends.values()]

    @property
    def addends(self) -> list[Addend[N]]:
        """The terms in order of first addition, as plain tuples."""
        return [(name, amount, source) for name, (amount, source) in self._addends.items()]


class Tally(TermSums[float]):
    """Accumulates the amounts of one choice by name."""

    def cost(self) -> Cost:
        """Return the terms in order of first addition."""
        return cost_of(self.addends)


def cost_of(addends: Iterable[Addend[float]]) -> Cost:
    """Return a cost with one term for each addend."""
    return Cost(tuple([Term(*addend) for addend in addends]))


def addends_of(cost: Cost) -> list[Addend[float]]:
    """Return the terms of a cost as plain tuples."""
    return [(term.name, term.amount, term.source) for term in cost.terms]


def total(costs: Iterable[Cost]) -> Cost:
    """Return the sum of several costs, with terms of the same name and source added together."""
    terms: list[Term] = []
    for cost in costs:
        terms.extend(cost.terms)
    return Cost(tuple(terms)).merged()


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank: `resident` always, `transient` only while the stage runs, `host` in the host's memory."""

    resident: Cost
    transient: Cost
    host: Cost = Cost()

    @property
    def resident_bytes(self) -> int:
        return math.ceil(self.resident.total)

    @property
    def peak_bytes(self) -> int:
        return math.ceil(self.resident.total + self.transient.total)

    @property
    def host_bytes(self) -> int:
        return math.ceil(self.host.total)
