"""What a run learned, drawn: its curves over the steps, and some of its responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwright.planner.report import words
from meshwright.planner.report.axis import linear
from meshwright.planner.report.html import Html, note, section, table, tag
from meshwright.planner.report.lines import PlotPoint, Series, plot
from meshwright.profiles.printable import printable

CURVES = {
    "score": "reward",
    "kl_to_ref": "KL to the reference, nats of a response",
    "entropy": "entropy, nats of a token",
    "response_tokens": "tokens of a response",
    "truncated_fraction": "truncated share of the responses",
    "actor_grad_norm": "gradient norm of the actor",
    "seconds": "seconds of a step",
}
"""What is drawn of the metrics of a run, by their names, and how it is called."""

HELD_OUT = "held-out reward"
"""The curve of the evaluations."""

_MOST_POINTS = 200
"""Of a curve; of more steps each point is the mean of some that follow each other."""

_MOST_MARKED = 30
"""Points of a curve that are drawn beside its line."""

_MOST_CHARACTERS = 2000
"""Of a text that is shown."""


@dataclass(frozen=True, kw_only=True)
class ShownSample:
    """A response of a step, what it answers, and its score."""

    step: int
    prompt: str
    response: str
    score: float


@dataclass(frozen=True, kw_only=True)
class Learned:
    """By the name of a curve the step and the value of each of its points; and the last responses that were kept."""

    run: str
    curves: Mapping[str, Sequence[tuple[int, float]]]
    samples: Sequence[ShownSample] = ()


def learning(runs: Sequence[Learned]) -> Html:
    """A plot for each curve that a run has, and a table of its last responses; or how to get them."""
    told = [one for one in runs if any(one.curves.values())]
    if not told:
        return section("learning", "Training", note("No run that trains: name the --out of a `meshwright run`."))
    return section("learning", "Training", *(part for one in told for part in _of_run(one)))


def _of_run(learned: Learned) -> Iterator[Html]:
    yield tag("h3", learned.run)
    plots = [_curve(name, points) for name, points in learned.curves.items() if len(points) > 1]
    yield tag("div", *plots, class_="pair")
    if learned.samples:
        rows = [
            (str(one.step), f"{one.score:.3f}", _shown(one.prompt), _shown(one.response)) for one in learned.samples
        ]
        yield table(("step", "score", "prompt", "response"), rows, numbers=range(2))


def _curve(name: str, points: Sequence[tuple[int, float]]) -> Html:
    called = CURVES.get(name, name)
    drawn = tuple(PlotPoint(x, y, f"step {x:.0f}: {y:.4g}") for x, y in _thinned(points))
    across = linear(drawn[0].x, drawn[-1].x)
    return plot(
        [Series("", words.COLOURS[0], drawn, marked=len(drawn) <= _MOST_MARKED)],
        across=across,
        names=[f"{tick:,g}" for tick in across.ticks],
        what="step",
        up=called,
        describe=f"{called} over the steps of the run",
    )


def _thinned(points: Sequence[tuple[int, float]]) -> Iterator[tuple[float, float]]:
    each = -(-len(points) // _MOST_POINTS)
    for begin in range(0, len(points), each):
        some = points[begin : begin + each]
        yield sum(x for x, _ in some) / len(some), sum(y for _, y in some) / len(some)


def _shown(text: str) -> str:
    return printable(text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ...")
