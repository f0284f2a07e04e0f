"""The grid of a state of the explorer as a sweep of its answered points."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.planner.analysis.sweep import Sweep, SweepPoint, sweep_of, sweep_point
from meshwright.planner.job.whatif_settings import Setting
from meshwright.runtime.explorer.searches import Answer, Refusal
from meshwright.runtime.explorer.state import State


def sweep_of_grid(state: State, answers: Sequence[Answer | None]) -> Sweep:
    """The sweep of the points of a state's grid that are answered; `answers` are in the order of the points."""
    points = (_point(state, point, answer) for point, answer in zip(state.points, answers, strict=True) if answer)
    return sweep_of(tuple(points), price=state.price, num_steps=state.num_steps)


def setting_of_point(state: State, point: State) -> Setting:
    """The values of the fields of a state's grid at one of its points."""
    return {path: point.values[path] for path, _ in state.grid}


def _point(state: State, point: State, answer: Answer) -> SweepPoint:
    setting = setting_of_point(state, point)
    if isinstance(answer.outcome, Refusal):
        return SweepPoint(setting=setting, plan=None, violations=(answer.outcome.sentence,))
    return sweep_point(
        setting,
        answer.outcome,
        answer.step_interval,
        price=state.price,
        num_steps=state.num_steps,
        is_cut_short=answer.stopped or answer.is_first,
    )
