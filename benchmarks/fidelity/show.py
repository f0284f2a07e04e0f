"""Scores as tables on a terminal, or as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from benchmarks.fidelity.score import Answer, Score

_WIDTH = 150
"""Columns that the tables need; a narrower terminal wraps them."""


def show(scores: Iterable[Score], *, num_worst: int) -> None:
    """One line per set, what was not read, and the worst rows with their largest terms."""
    console, scores = Console(), list(scores)
    console.width = max(console.width, _WIDTH)
    console.print(_summary(scores))
    for score in scores:
        for reason, times in score.skipped.most_common():
            console.print(f"{score.name}: {times} rows not read: {reason}", style="dim", highlight=False)
    if num_worst:
        for score in scores:
            if score.answers:
                console.print(_worst(score, num_worst))


def as_json(scores: Iterable[Score], *, num_worst: int) -> str:
    """The same figures, one object per set."""
    return json.dumps([_object(score, num_worst) for score in scores], indent=2)


def _summary(scores: Iterable[Score]) -> Table:
    table = Table(title="predicted against published")
    table.add_column("set")
    for column in ("rows read", "median", "mean (bar)", "p90", "bias", "Spearman (bar)", "regret (bar)", "inside"):
        table.add_column(column, justify="right")
    for score in scores:
        table.add_row(
            score.name,
            f"{score.used} of {score.used + score.skipped.total()}",
            _percent(score.median),
            _mean(score),
            _percent(score.p90),
            _percent(score.bias),
            _correlation(score),
            _percent(score.regret) + _at_most(score.bar.regret),
            _percent(score.coverage),
        )
    return table


def _worst(score: Score, number: int) -> Table:
    table = Table(title=f"{score.name}: worst rows")
    for column in ("row", "measured", "predicted", "error", "largest terms"):
        table.add_column(column, justify="left" if column in ("row", "largest terms") else "right")
    for answer in score.worst(number):
        table.add_row(
            answer.label, f"{answer.measured:.4g}", f"{answer.predicted:.4g}", _percent(answer.error), _terms(answer)
        )
    return table


def _terms(answer: Answer) -> str:
    largest = sorted(answer.terms.terms, key=lambda term: -term.amount)[:6]
    return ", ".join(f"{term.name} {term.amount:.3g}" for term in largest)


def _mean(score: Score) -> str:
    """As a share, or in microseconds where those are judged."""
    if score.bar.seconds is None:
        return _percent(score.mean) + _at_most(score.bar.mean)
    return f"{1e6 * score.seconds:.1f} us (<= {1e6 * score.bar.seconds:g} us)"


def _percent(value: float) -> str:
    return "" if math.isnan(value) else f"{100 * value:.1f} %"


def _at_most(bar: float | None) -> str:
    return "" if bar is None else f" (<= {_percent(bar).replace('.0 ', ' ')})"


def _correlation(score: Score) -> str:
    bar = "" if score.bar.spearman is None else f" (>= {score.bar.spearman})"
    return "" if math.isnan(score.spearman) else f"{score.spearman:.3f}{bar}"


def _object(score: Score, num_worst: int) -> dict[str, object]:
    figures = {
        name: getattr(score, name)
        for name in ("median", "mean", "seconds", "p90", "bias", "spearman", "regret", "coverage")
    }
    return {
        "set": score.name,
        "used": score.used,
        "skipped": dict(score.skipped.most_common()),
        "bars": asdict(score.bar),
        **{name: None if math.isnan(value) else value for name, value in figures.items()},
        "worst": [
            {
                "row": a.label,
                "measured": a.measured,
                "predicted": a.predicted,
                "terms": {term.name: term.amount for term in a.terms.terms},
            }
            for a in score.worst(num_worst)
        ],
    }
