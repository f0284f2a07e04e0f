"""How near answers are to measurements: relative errors, rank correlation, and the regret of what they would pick."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from benchmarks.fidelity.intervals import Doubt, Shift, range_of
from meshwright.cost_models.cost import Cost
from meshwright.profiles.uncertainty import Interval


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One row answered, in the row's own unit: seconds, or a rate when `rate` is true.

    Rows of one `setting` are choices for the same work; an empty setting competes with nothing. `ask` predicts again
    with an input shifted, and `doubt` is what else is uncertain; both are None where no range is predicted.
    """

    label: str
    measured: float
    predicted: float
    terms: Cost = field(default_factory=Cost)
    setting: str = ""
    rate: bool = False
    ask: Callable[[Shift], float] | None = None
    doubt: Doubt | None = None

    @cached_property
    def interval(self) -> Interval | None:
        """The range of the prediction, where one is predicted."""
        return range_of(self.ask, self.doubt) if self.ask and self.doubt else None

    @property
    def error(self) -> float:
        """Relative and signed: 0.1 is a prediction 10 % above the measurement."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What a set has to reach; None where nothing is asked."""

    mean: float | None = None
    spearman: float | None = None
    regret: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Score:
    """The figures of one set of rows."""

    name: str
    bar: Bar
    answers: tuple[Answer, ...]
    skipped: Counter[str]

    @property
    def used(self) -> int:
        return len(self.answers)

    @property
    def mean(self) -> float:
        """Mean absolute relative error."""
        return float(np.mean(self._absolute)) if self.answers else float("nan")

    @property
    def seconds(self) -> float:
        """Mean absolute error of rows that are seconds, in seconds."""
        return float(np.mean([abs(a.predicted - a.measured) for a in self.answers])) if self.answers else float("nan")

    @property
    def median(self) -> float:
        return float(np.median(self._absolute)) if self.answers else float("nan")

    @property
    def p90(self) -> float:
        return float(np.quantile(self._absolute, 0.9)) if self.answers else float("nan")

    @property
    def bias(self) -> float:
        """Mean signed relative error."""
        return float(np.mean([a.error for a in self.answers])) if self.answers else float("nan")

    @property
    def spearman(self) -> float:
        """Rank correlation of predictions with measurements; not a number for fewer than three rows, or rows of which
        one and the same is predicted."""
        predicted = [a.predicted for a in self.answers]
        if self.used < 3 or len(set(predicted)) == 1:
            return float("nan")
        return rank_correlation(predicted, [a.measured for a in self.answers])

    @property
    def regret(self) -> float:
        """Mean loss of the choice that looks best to the model, over settings with two choices or more."""
        losses = list(regrets(self.answers).values())
        return float(np.mean(losses)) if losses else float("nan")

    @property
    def coverage(self) -> float:
        """Share of the rows with a range that lie in it; not a number without such rows."""
        ranges = [(answer.measured, answer.interval) for answer in self.answers if answer.interval]
        inside = [found.p10 <= measured <= found.p90 for measured, found in ranges]
        return float(np.mean(inside)) if inside else float("nan")

    def worst(self, number: int) -> tuple[Answer, ...]:
        return tuple(sorted(self.answers, key=lambda a: -abs(a.error))[:number])

    @property
    def _absolute(self) -> NDArray[np.float64]:
        return np.abs([answer.error for answer in self.answers])


def regrets(answers: Iterable[Answer]) -> dict[str, float]:
    """By setting: how much the measurement of the predicted best falls short of the best measurement, as a share."""
    settings: dict[str, list[Answer]] = {}
    for answer in answers:
        if answer.setting:
            settings.setdefault(answer.setting, []).append(answer)
    return {name: _regret(choices) for name, choices in settings.items() if len(choices) > 1}


def _regret(choices: Sequence[Answer]) -> float:
    sign = -1 if choices[0].rate else 1
    picked = min(choices, key=lambda a: sign * a.predicted)
    best = min(choices, key=lambda a: sign * a.measured)
    return abs(picked.measured - best.measured) / best.measured


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks, equal values sharing their mean rank."""
    return float(np.corrcoef(_ranks(left), _ranks(right))[0, 1])


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    upper = np.cumsum(counts)
    mean_ranks: NDArray[np.float64] = upper - (counts - 1) / 2
    return mean_ranks[inverse]
