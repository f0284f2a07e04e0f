"""The tables of `watch`. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.planner.report.words import count, difference, percent, seconds
from meshwright.runtime.records.run_standing import RunStanding
from meshwright.runtime.records.version_gap import KL_ERROR, KL_TO_TEACHERS, PROB_ERROR

_SIGNALS = (
    ("score", "reward"),
    ("kl_to_teachers", "KL to the teachers per response, k1"),
    (KL_TO_TEACHERS, "KL to the teachers per token, k1"),
    ("kl_to_ref", "KL to the reference per response, k1"),
    ("kl_to_ref_per_token", "KL to the reference per token, k1"),
    ("entropy", "entropy"),
    ("approx_kl", "KL per update, k3"),
    ("clip_fraction", "clip fraction"),
    ("actor_grad_norm", "actor gradient norm"),
    ("explained_variance", "explained variance"),
    ("response_tokens", "response tokens"),
    ("truncated_fraction", "truncated fraction"),
    (PROB_ERROR, f"generator against trainer, {PROB_ERROR}"),
    (KL_ERROR, f"generator against trainer, {KL_ERROR}"),
)
"""The training metrics that are shown, and their labels."""

_TAKEN_FOR_FAULTS = {PROB_ERROR: 1.05, KL_ERROR: 0.02}
"""Thresholds above which generator and trainer disagree, from NeMo-RL's tests."""

_MOST_CAUSES, _LEAST_SHARE = 4, 0.001

_LEAST_PART = 0.01
"""Share of a step below which no error is shown."""


def view(found: RunStanding) -> RenderableType:
    """The tables of a run's recent steps."""
    if not found.num_recent:
        return Text(f"{found.directory}: {_state(found)}, no step has been finished yet")
    return Group(Text(_head(found)), _times(found), _uses(found), _signals(found), *_held_out(found))


def _state(found: RunStanding) -> str:
    return "running" if found.is_running else "not running"


def _head(found: RunStanding) -> str:
    assert found.step_seconds is not None
    assert found.tokens_per_second is not None
    assert found.quiet_seconds is not None
    learned = found.learned
    stale = (
        f"; staleness {learned['staleness']:.2f} on average, {learned['max_staleness']:.0f} at most, "
        f"{found.staleness_bound} allowed"
        if "staleness" in learned
        else ""
    )
    return (
        f"{found.directory}: {_state(found)}, {found.updates} steps, the last {found.quiet_seconds:.0f} s ago\n"
        f"{count(found.tokens_per_second)} response tokens/s, step {seconds(found.step_seconds)}, planned "
        f"{seconds(found.plan_seconds)} (last {found.num_recent} steps){stale}"
    )


def _times(found: RunStanding) -> Table:
    table = Table(title="seconds of a step", box=box.SIMPLE)
    for heading in ("", "predicted", "measured", "error"):
        table.add_column(heading, justify="right" if heading else "left")
    least = _LEAST_PART * max(row.measured_seconds for row in found.comparisons)
    for row in found.comparisons:
        error = difference(row.error) if row.measured_seconds > least else ""
        table.add_row(row.name, f"{row.predicted_seconds:.3f}", f"{row.measured_seconds:.3f}", error)
    return table


def _uses(found: RunStanding) -> Table:
    table = Table(title="idle time", box=box.SIMPLE)
    for heading in ("", "idle", "waiting for"):
        table.add_column(heading, justify="right" if heading == "idle" else "left")
    for use in found.uses[:1] + tuple(use for use in found.uses[1:] if use.ranks != found.uses[0].ranks):
        causes = [f"{one.what} {percent(one.share)}" for one in use.waits[:_MOST_CAUSES] if one.share >= _LEAST_SHARE]
        table.add_row(use.name, percent(use.idle_share), ", ".join(causes) or "-")
    return table


def _signals(found: RunStanding) -> Table:
    table = Table(title=f"training, mean of {found.num_recent} steps", box=box.SIMPLE)
    for heading in ("", "mean", ""):
        table.add_column(heading, justify="right" if heading else "left")
    for name, told in _SIGNALS:
        if name in found.learned:
            table.add_row(told, f"{found.learned[name]:.4g}", _fault(name, found.learned))
    return table


def _fault(name: str, learned: Mapping[str, float]) -> str:
    most = _TAKEN_FOR_FAULTS.get(name)
    return f"above {most:g}: they disagree" if most is not None and learned[name] > most else ""


def _held_out(found: RunStanding) -> Iterator[Text]:
    if found.held_out:
        first, last, by_teachers = found.held_out[0], found.held_out[-1], KL_TO_TEACHERS in found.learned
        what, sign = ("KL to the teachers per token", -1) if by_teachers else ("reward", 1)
        yield Text(
            f"held-out {what} after {last['step']:.0f} updates: {sign * last['mean_score']:.3f} ± "
            f"{last['standard_error']:.3f}, {sign * first['mean_score']:.3f} at the first evaluation"
        )
