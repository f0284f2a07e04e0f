"""The section on training: curves of the metrics of runs over the steps, and some of their responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from meshwright.planner.report import formatting
from meshwright.planner.report.charts import PlotPoint, Series, linear, plot
from meshwright.planner.report.rendering import render
from meshwright.profiles.untrusted_text import printable

CURVES = {
    "score": "reward",
    "kl_to_ref": "KL to the reference, nats per response",
    "entropy": "entropy, nats per token",
    "response_tokens": "tokens per response",
    "truncated_fraction": "truncated share of the responses",
    "actor_grad_norm": "gradient norm of the actor",
    "seconds": "seconds per step",
}
"""The metrics of a run that are plotted, by name, with the titles of their plots."""

HELD_OUT = "held-out reward"
"""The name of the curve of evaluations."""

_MAX_POINTS = 200
"""Maximum number of points of a curve; with more steps, each point is a mean over consecutive steps."""

_MAX_MARKED_POINTS = 30
"""Maximum number of points of a curve whose points are marked on its line."""

_MAX_CHARACTERS = 2000
"""Maximum number of characters of a text that are shown."""


@dataclass(frozen=True, kw_only=True)
class ShownSample:
    """A prompt with its response and score, from a step of a run."""

    step: int
    prompt: str
    response: str
    score: float


@dataclass(frozen=True, kw_only=True)
class TrainingCurves:
    """The training curves of a run, by name as (step, value) points, and its last recorded responses."""

    run: str
    curves: Mapping[str, Sequence[tuple[int, float]]]
    samples: Sequence[ShownSample] = ()


@dataclass(frozen=True, kw_only=True)
class _DrawnRun:
    """The plots of a run, and the rows of the table of its samples."""

    name: str
    plots: Sequence[Markup]
    samples: Sequence[tuple[str, ...]]


def training_section(runs: Sequence[TrainingCurves]) -> Markup:
    """Return the section: a plot for each curve of each run, and a table of its last responses; or a hint on how
    to get them."""
    return render("learning.html", runs=[_drawn(run) for run in runs if any(run.curves.values())])


def _drawn(run: TrainingCurves) -> _DrawnRun:
    return _DrawnRun(
        name=run.run,
        plots=[_curve(name, points) for name, points in run.curves.items() if len(points) > 1],
        samples=[
            (str(sample.step), f"{sample.score:.3f}", _shortened(sample.prompt), _shortened(sample.response))
            for sample in run.samples
        ],
    )


def _curve(name: str, points: Sequence[tuple[int, float]]) -> Markup:
    title = CURVES.get(name, name)
    plot_points = tuple(PlotPoint(x, y, f"step {x:.0f}: {y:.4g}") for x, y in _thinned(points))
    x_axis = linear(plot_points[0].x, plot_points[-1].x)
    return plot(
        [Series("", formatting.COLOURS[0], plot_points, marked=len(plot_points) <= _MAX_MARKED_POINTS)],
        x_axis=x_axis,
        tick_labels=[f"{tick:,g}" for tick in x_axis.ticks],
        x_label="step",
        y_label=title,
        describe=f"{title} over the steps of the run",
    )


def _thinned(points: Sequence[tuple[int, float]]) -> Iterator[tuple[float, float]]:
    points_per_mean = -(-len(points) // _MAX_POINTS)
    for start in range(0, len(points), points_per_mean):
        chunk = points[start : start + points_per_mean]
        yield sum(x for x, _ in chunk) / len(chunk), sum(y for _, y in chunk) / len(chunk)


def _shortened(text: str) -> str:
    return printable(text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} ...")
