"""The terminal output of runs and of a calibration by one. Nothing is computed here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meshwright.planner.analysis.calibration import Calibration
from meshwright.planner.report.formatting import difference, size
from meshwright.profiles.untrusted_text import printable
from meshwright.runtime.cli.view_plan import print_to_stderr
from meshwright.runtime.records.record import EvaluationRecord, RunSummary
from meshwright.runtime.records.resource_use import MemoryUse
from meshwright.runtime.records.results import RewardTrial

_LENGTH_TOLERANCE = 0.1
"""Relative difference of mean response lengths up to which predicted and measured times are for the same work."""


_MAX_CELL_CHARACTERS = 40
"""Length limit of a prompt or a response in a table; --json has all of it."""

_MIN_SHARE = 0.01
"""Share of a step below which no error is shown."""


def print_reward_trial(trial: RewardTrial) -> None:
    """Print a row for each made-up response, the calls that failed, and remarks on the scores."""
    console = Console()
    table = Table(title="made-up responses and their scores", box=box.SIMPLE, padding=(0, 1, 0, 0))
    names = [score.reward for score in trial.samples[0].scores]
    for heading in ("row", "response", ""):
        table.add_column(heading)
    for heading in (*names, "reward", "slowest s"):
        table.add_column(heading, justify="right")
    for sample in trial.samples:
        kind = "the answer" if sample.is_answer else "the prompt"
        scores = ("-" if score.score is None else f"{score.score:g}" for score in sample.scores)
        slowest = max((score.seconds for score in sample.scores if score.seconds is not None), default=None)
        table.add_row(
            sample.id,
            kind,
            escape(shortened(sample.response)),
            *scores,
            "-" if sample.total is None else f"{sample.total:g}",
            "-" if slowest is None else f"{slowest:.3f}",
        )
    console.print(table)
    for sample in trial.samples:
        for score in sample.scores:
            if score.error is not None:
                console.print(score.error, markup=False, highlight=False, soft_wrap=True)
    for note in trial.notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)


def shortened(text: str) -> str:
    """The beginning of a text on one line, printable and short enough for a cell."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= _MAX_CELL_CHARACTERS else f"{line[: _MAX_CELL_CHARACTERS - 1]}…"


def print_run_summary(
    summary: RunSummary, out: Path, at_observed_lengths: Callable[[], Mapping[str, float]] = dict
) -> None:
    """Print predicted and measured seconds, and the held-out rewards.

    Where responses were longer or shorter than planned, `at_observed_lengths` returns the predicted seconds by row at
    the observed lengths, with which the measured ones are then compared. It returns none if they are not known.
    """
    console = Console()
    observed = {} if _has_planned_lengths(summary) else at_observed_lengths()
    console.print(_table_of_seconds(summary, observed))
    console.print(
        f"{summary.tokens_per_second:.0f} response tokens/s (median); a response had "
        f"{summary.response_tokens:.0f} tokens on average, the plan expects {summary.expected_response_tokens:.0f}"
        + _length_hint(summary, observed)
    )
    if summary.memory:
        console.print(_memory_table(summary.memory))
        console.print(
            "memory of the fullest rank: planned for sequences of maximum length, measured without what a process "
            "holds beside its models before the step"
        )
    if summary.overhead is not None:
        console.print(
            f"{summary.overhead:.1%} of a step is neither stages nor messages (worst rank, median over steps)"
        )
    if gap := summary.generator_gap:
        console.print(
            f"generator against trainer: log-probabilities of the same weights differ by {gap.mean:.1e} on average, "
            f"at most {gap.largest:.1e} (on {gap.measured_on})"
        )
    if (speculation := summary.speculation) and not speculation.drafted:
        console.print(
            "drafts: no decode round had one, as no end of a sequence occurred before in the texts of its prompt; "
            "`meshwright plan --from-trace` plans without drafts"
        )
    elif speculation:
        by_position = ", ".join(f"{chance:.0%}" for chance in speculation.acceptance)
        sampled = speculation.round_of(speculation.max_draft).sampled
        console.print(
            f"drafts: {speculation.drafted:.0%} of the decode rounds of a sequence had one, whose tokens were accepted "
            f"in {by_position} of the rounds that came to them; a round sampled {sampled:.2f} tokens"
        )
    _print_evaluations(console, summary)
    for restart in summary.restarts:
        console.print(restart.message, markup=False)
    console.print(f"metrics.jsonl, trace.jsonl, trace.chrome.json, summary.json and checkpoints are in {out}")


def _print_evaluations(console: Console, summary: RunSummary) -> None:
    """Print each evaluation, and for each set of held-out prompts the rise from the first to the last."""
    for evaluation in summary.evaluations:
        metric, unit, _ = _metric_words(evaluation)
        console.print(
            f"{evaluation.title} {metric} after {evaluation.step} updates: {evaluation.reported_score:.3f} ± "
            f"{evaluation.standard_error:.3f}{unit} (standard error over {evaluation.num_prompts} prompts, "
            f"{evaluation.mean_response_tokens:.0f} tokens a response)"
        )
    for name in summary.evaluated_sets:
        if improvement := summary.improvement(name):
            gain, error = improvement
            times = f", {gain / error:.1f} standard errors" if error else ""
            last = next(one for one in reversed(summary.evaluations) if one.prompt_set == name)
            metric, unit, verb = _metric_words(last)
            console.print(f"{last.title} {metric} {verb} by {gain:.3f} ± {error:.3f}{unit}{times}")


def _table_of_seconds(summary: RunSummary, observed: Mapping[str, float]) -> Table:
    """Return a table of predicted and measured seconds; with those predicted at the observed lengths, if there are any,
    and the error of these."""
    table = Table(title=f"predicted and measured seconds per step, {summary.steps} steps", box=box.SIMPLE)
    at_observed = ("at observed lengths s",) if observed else ()
    for heading in ("", "predicted s", *at_observed, "measured s", "error"):
        table.add_column(heading, justify="right" if heading else "left")
    min_seconds = _MIN_SHARE * max(row.measured_seconds for row in summary.comparisons)
    for row in summary.comparisons:
        compared = replace(row, predicted_seconds=observed.get(row.name, row.predicted_seconds))
        table.add_row(
            row.name,
            f"{row.predicted_seconds:.3f}",
            *((f"{compared.predicted_seconds:.3f}",) if observed else ()),
            f"{row.measured_seconds:.3f}",
            difference(compared.error) if row.measured_seconds > min_seconds else "",
        )
    return table


def _has_planned_lengths(summary: RunSummary) -> bool:
    """True if responses were about as long as planned."""
    return math.isclose(summary.response_tokens, summary.expected_response_tokens, rel_tol=_LENGTH_TOLERANCE)


def _length_hint(summary: RunSummary, observed: Mapping[str, float]) -> str:
    """Return a hint if the responses were longer or shorter than planned."""
    if _has_planned_lengths(summary):
        return ""
    if observed:
        return ", so the error is that of the prediction at the observed lengths"
    return "; `meshwright calibrate` predicts for the observed lengths"


def _metric_words(evaluation: EvaluationRecord) -> tuple[str, str, str]:
    """Return the metric of an evaluation, its unit, and the verb for an improvement."""
    return ("divergence to the teachers", " nats a token", "fell") if evaluation.by_teachers else ("reward", "", "rose")


def print_run_stopped(done: int, steps: int, saved: int | None, out: Path) -> None:
    """Print that a run stopped on request, and how to continue it."""
    next_step = f"its checkpoint of step {saved} is in {out}; continue it with --resume"
    if saved is None:
        next_step = "no step was finished, so there is nothing to resume; run it again"
    print_to_stderr(f"stopped after {done} of {steps} steps: {next_step}.")


def _memory_table(uses: Sequence[MemoryUse]) -> Table:
    """Planned and measured peak memory of each stage."""
    table = Table("peak memory", box=box.SIMPLE)
    for heading in ("planned", "measured"):
        table.add_column(heading, justify="right")
    for use in uses:
        table.add_row(use.stage, size(use.planned_bytes), size(use.measured_bytes))
    return table


def print_calibration(calibration: Calibration, path: Path) -> None:
    """Print each stage's predicted seconds before and after the correction, and the measured seconds."""
    console = Console()
    table = Table(title=f"seconds of each stage, median of {calibration.num_steps} steps", box=box.SIMPLE)
    for heading in ("", "planned", "before", "measured", "after"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in calibration.rows:
        seconds = (row.planned_seconds, row.before_seconds, row.measured_seconds, row.after_seconds)
        table.add_row(row.stage, *(f"{value:.3f}" for value in seconds))
    table.caption = "before, after: predicted for the lengths of the run"
    console.print(table)
    if calibration.response_tokens is not None:
        console.print(
            f"a response had {calibration.response_tokens:.0f} tokens, the plan expects "
            f"{calibration.expected_response_tokens:.0f}"
        )
    console.print(f"written to {path}")
