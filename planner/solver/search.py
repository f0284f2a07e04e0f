"""The search for the best answer to a problem, with a proven lower bound.

A model (`planner.solver.model`) is one of two ways to state a problem as an integer program. The search is the same for
both:

    incumbent  = the best of the model's local search or, if it has none, among a few modes per task
    bound      = the bound of the problem in which short tasks have only representative modes (`coarse_problem.py`)
    incumbent  = the best among the modes on as many ranks as the best representatives; often the search ends here
    bound      = the least bound of a combination of modes of the longest tasks
    repeat
        aim    = the bound plus a stride; strides grow
        modes  = those of the combinations that can meet the aim (`mode_combinations.py`); often there is none
        bound  = the least bound of a combination
        with memory and times rounded to coarse units and few layouts, then with more layouts, then with all, and at
        last without rounding
            repeat while the incumbent improves
                target     = the aim, or a makespan that is better than the incumbent by more than the requested gap
                problem    = the modes that can meet the target, rounded down to whole units
                bound      = what CP-SAT proves for it, in coarse steps of the makespan
                incumbent  = the best within the target among modes similar to those that CP-SAT picked
                incumbent  = if that did not suffice and layouts were few, the best among all layouts on as many ranks,
                             even beyond the aim if it is within the gap of the bound
    until the gap or the limit is reached
    incumbent  = the answer at which the model's local search from it ends: as short, often with less work

Work is measured in ticks x ranks. A model also reads an answer from a solution of its program, and has a local search
or none. The further a target lies above the bound, the more combinations may meet it. Hence the search starts near the
bound: an answer found there leaves little to prove, and the absence of one is proven without CP-SAT or with few modes.
Everything is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from meshwright.planner.solver.coarse_problem import (
    coarsened,
    fastest_few,
    short_tasks,
    similar_to_coarse,
    similar_to_picked,
    with_representatives_only,
    without_dominated,
)
from meshwright.planner.solver.cp_sat import Solved, Steps, run_cp_sat
from meshwright.planner.solver.lower_bounds import least_makespan, modes_within
from meshwright.planner.solver.mode_combinations import combinations_within
from meshwright.planner.solver.model import Incumbent, Model, Program
from meshwright.planner.solver.problem import Mode, Problem, shortest_period
from meshwright.planner.solver.result import Answer, Effort, Limits, Progress, Result, picked_modes

_STEPS = 64
"""Number of steps into which the range of makespans is divided for CP-SAT."""

_FIRST_ANSWER_TIME = 4.0
"""Limit of CP-SAT's deterministic time for a first answer."""

_FIRST_ANSWER_RANGE = 4
"""A first answer is searched for within this multiple of the bound, and only then without a limit."""

_MEMORY_PARTS = 64
"""Number of units into which a device's memory is divided in rounded problems."""

_MERGE_GAPS = (2, 1 / 8)
"""Multiples of the requested gap: layouts whose transfer times differ by less are merged, in a first and a second pass.
The size of a model grows with its pairs of layouts, and most transfers are short compared to a period."""

_MANY_MODES = 700
"""Number of modes beyond which CP-SAT proves a bound faster if it first solves the problem with merged layouts."""

_STEP_SHARE = 1 / 4
"""Length of a step as a share of the requested gap, if `_STEPS` steps would be shorter."""

_MAX_PAIRS = 1_200_000
"""Number of pairs of a combination and a mode of the next task up to which tasks are joined: a second of work."""

_STRIDE, _STRIDE_GROWTH, _LONGEST_STRIDE = 0.01, 1.5, 0.1
"""First stride, as a share of the bound, the factor by which strides grow, and the longest one, as a share of the aim.

The first stride is the requested gap if that is more.
"""

_SHORT_TASK_GAPS, _FINER_GAP = 2, 1.3
"""Tasks that take less of the bound than this multiple of the requested gap get representatives.

The problem with representatives is solved to a gap finer by the second factor.
"""

_TICKS_PER_GAP = 128
"""Times are rounded to the requested gap divided by this number.

Ten activities (runs and transfers) in sequence then lose at most a tenth of the gap.
"""


def search(model: Model, problem: Problem, limits: Limits, progress: Progress, effort: Effort) -> Result:
    """Return the best answer within the limits and the proven lower bound; every task must have modes.

    The work is added to `effort`.
    """
    state = _SearchState(model, problem, limits, progress, effort)
    remaining = without_dominated(problem)
    if any(not task.modes for task in remaining.tasks):
        return Result(status="infeasible", answer=None, objective=None, bound=0)
    state.bound = least_makespan(remaining)
    if limits.max_makespan is None:
        state.find_first(fastest_few(remaining))
    state.search_representatives(remaining)
    state.search_in_rounds(remaining)
    if state.set_aside:
        state.offer(state.set_aside)
    state.polish()
    return state.result()


def first_answer(model: Model, problem: Problem, limits: Limits, effort: Effort) -> Result | None:
    """Return the best answer among a few modes per task, or None if there is none."""
    state = _SearchState(model, problem, limits, _ignore_progress, effort)
    remaining = without_dominated(problem)
    if any(not task.modes for task in remaining.tasks):
        return None
    state.bound = least_makespan(remaining)
    state.find_first(fastest_few(remaining))
    return state.result() if state.answer else None


@dataclass
class _SearchState:
    """The state of the search: the best answer so far, the bounds, and the deterministic time left.

    `set_aside` is an answer found with representatives; until the end, the search ignores it. If `is_rough`, any answer
    within the gap serves as well as a shorter one."""

    model: Model
    problem: Problem
    limits: Limits
    progress: Progress
    effort: Effort
    bound: int = 0
    makespan: int = 0
    answer: Answer | None = None
    set_aside: Answer | None = None
    aim: int | None = None
    is_rough: bool = False
    time_left: float = field(init=False)

    def __post_init__(self) -> None:
        self.time_left = self.limits.max_deterministic_time

    @property
    def target(self) -> int:
        """The largest allowed makespan that improves on the answer by more than the requested gap."""
        longest = self.longest if self.answer is None else self.limits.target(self.makespan)
        return longest if self.aim is None else min(longest, self.aim)

    @property
    def _longest_worthwhile(self) -> int:
        """The largest makespan of a better answer that meets the target or is within the gap of the bound."""
        acceptable = max(self.longest, self.limits.max_acceptable_makespan or 0)
        longest = acceptable if self.answer is None else min(acceptable, self.makespan - 1)
        return min(longest, max(self.target, self.limits.comparable_makespan(self.bound)))

    @property
    def longest(self) -> int:
        """The largest allowed makespan; the horizon of the problem if there is no limit."""
        return self.problem.horizon if self.limits.max_makespan is None else self.limits.max_makespan

    @property
    def is_open(self) -> bool:
        """True if time is left and an answer within the target is not excluded."""
        in_time = self.time_left > 0 and self.limits.seconds_left > 0
        return in_time and self.bound <= self.target

    @property
    def _rounding_ticks(self) -> int:
        """Ticks to which times may be rounded with little effect on the bound."""
        return max(1, int(self.limits.tolerance * self.bound) // _TICKS_PER_GAP)

    @property
    def _proven(self) -> int:
        """The proven bound, or the answer's makespan if that is shorter."""
        return min(self.bound, self.makespan) if self.answer else self.bound

    def modes_within_target(self, problem: Problem) -> Problem:
        """Return the problem without modes that cannot meet the target, and raise the bound accordingly.

        If a task has none left, the bound rises above the target.
        """
        target = self.target
        remaining = modes_within(problem, target)
        bound = least_makespan(remaining) if all(task.modes for task in remaining.tasks) else target + 1
        self._raise_bound(min(bound, target + 1))
        return remaining

    def find_first(self, restricted: Problem) -> None:
        """Search for a first answer among a few modes, with at most `_FIRST_ANSWER_TIME` for each attempt.

        A last attempt with the remaining time improves it.
        """
        for incumbent in self.model.local_search(restricted, self.limits):
            self.offer(self._answer_of(incumbent))
        if self.answer is not None:
            return
        longest = self.target
        for target in (min(_FIRST_ANSWER_RANGE * self.bound, longest), longest):
            if self.answer is None and self.is_open:
                self._search_among(restricted, max(target, self.bound), _FIRST_ANSWER_TIME)
        if self.answer is not None and self.is_open:
            self._search_among(restricted, self.target, self.time_left)

    def search_representatives(self, problem: Problem) -> None:
        """Solve the problem with representatives for short tasks, then search among the similar real modes.

        One representative replaces all modes of a short task that use the same number of ranks.
        """
        short = short_tasks(problem, _SHORT_TASK_GAPS * self.limits.tolerance * self.bound)
        if not problem.anywhere or not self.is_open or not _are_quarter_of_modes(problem, short):
            return
        problem = self.modes_within_target(problem)
        if not self.is_open:
            return
        limits = replace(self.limits, gap=self.limits.tolerance / _FINER_GAP, max_makespan=self.target)
        with_representatives = with_representatives_only(problem, short)
        relaxed = _SearchState(
            self.model, with_representatives, limits, _ignore_progress, self.effort, self.bound, is_rough=True
        )
        relaxed.search_in_rounds(relaxed.problem)
        self.time_left -= limits.max_deterministic_time - relaxed.time_left
        result = relaxed.result()
        self._raise_bound(min(result.bound, self.target + 1))
        if result.answer is not None and self.is_open:
            answer, similar = (
                self.answer,
                similar_to_picked(problem, picked_modes(relaxed.problem, result.answer), short),
            )
            within_gap = min(self.target, self.limits.comparable_makespan(self.bound))
            self._search_among(similar, within_gap, self.time_left)
            # Answers that are only a little shorter would be hard to exclude, so the new answer is set aside.
            if self.is_open and self.answer is not answer:
                self.set_aside, self.answer = self.answer, None

    def search_in_rounds(self, problem: Problem) -> None:
        """Search in rounds with a growing aim; a round without an answer raises the bound to the aim.

        Aims that combinations of the longest tasks exclude at once are passed over.
        """
        aim, stride = self.bound, max(self.limits.tolerance, _STRIDE) * self.bound
        problem = self._without_excluded(problem)
        while self.is_open:
            aim += math.ceil(stride)
            stride = min(_STRIDE_GROWTH * stride, _LONGEST_STRIDE * aim)
            if aim > self.bound:
                self.aim = aim
                within_aim = self._without_excluded(problem)
                if self.is_open:
                    self._prove(within_aim)
                self.aim = None

    def _without_excluded(self, problem: Problem) -> Problem:
        """Return the problem with the modes that combinations of modes leave possible, and raise the bound
        accordingly."""
        remaining = self.modes_within_target(problem)
        if not self.is_open:
            return remaining
        possible = combinations_within(remaining, self.target, max_pairs=_MAX_PAIRS)
        self._raise_bound(int(possible.bounds.min()) if len(possible) else self.target + 1)
        return remaining.with_modes({name: modes.tolist() for name, modes in possible.modes.items()})

    def _prove(self, problem: Problem) -> None:
        """Search for better answers within the aim until none is left or time runs out."""
        remaining = problem
        for gaps in _MERGE_GAPS:
            merged_ticks = int(self.limits.tolerance * self.bound * gaps)
            if merged_ticks and self._has_many_modes(remaining):
                remaining = self._tighten(remaining, merged_ticks)
        remaining = self._tighten(remaining)
        while self.is_open:
            remaining = self.modes_within_target(remaining)
            if self.is_open:
                self._finish(remaining)

    def _has_many_modes(self, problem: Problem) -> bool:
        """True if more than `_MANY_MODES` modes are left after rounding: merging layouts first then saves time."""
        if not self.is_open:
            return False
        remaining = self.modes_within_target(problem)
        if _num_modes(remaining) <= _MANY_MODES:  # rounding adds none
            return False
        coarse = coarsened(remaining, parts=_MEMORY_PARTS, ticks=self._rounding_ticks).problem
        return _num_modes(coarse) > _MANY_MODES

    def _tighten(self, problem: Problem, merged_ticks: int = 0) -> Problem:
        """Tighten the bound and improve the answer on the rounded problem while the answer improves.

        Returns the problem with the modes that are left.
        """
        is_better = True
        while self.is_open and is_better:
            problem, answer = self.modes_within_target(problem), self.answer
            if not self.is_open:
                break
            coarse = coarsened(problem, parts=_MEMORY_PARTS, ticks=self._rounding_ticks, merge_ticks=merged_ticks)
            before = self.time_left
            picked = self._tighten_bound(coarse.problem)
            spent = before - self.time_left
            if picked and self.is_open:
                self._search_among(similar_to_coarse(problem, picked, coarse), self.target, self.time_left)
            if (
                picked and self.is_open and (merged_ticks or self.is_rough)
            ):  # with fewer modes the rest is proven quickly
                self._search_beyond_aim(problem, picked, min(spent, self.time_left))
            is_better = self.answer is not answer
        return problem

    def _tighten_bound(self, relaxed: Problem) -> tuple[Mode, ...]:
        """Tighten the bound with a relaxed problem, and return the modes of its best answer, if there is one."""
        steps = self._steps_to(self.target)
        solved, program = self._run(relaxed, steps, self.time_left)
        self._raise_bound_by(solved, steps)
        return _picked(relaxed, solved, program) if solved.is_found else ()

    def _finish(self, problem: Problem) -> None:
        """Search for a better answer among all modes that can be part of one, and tighten the bound."""
        steps = self._steps_to(self.target)
        solved, program = self._run(problem, steps, self.time_left)
        if solved.is_found:
            self.offer(_answer(self.problem, problem, solved, program))
        self._raise_bound_by(solved, steps)

    def _search_beyond_aim(self, problem: Problem, picked: Sequence[Mode], limit: float) -> None:
        """Search all layouts on as many ranks as those picked for an answer within the gap, even beyond the aim.

        If an answer lies just above the aim, finding it is faster than proving that none lies below the aim.
        """
        names = [task.name for task in problem.tasks]
        self._search_among(
            similar_to_picked(problem, dict(zip(names, picked, strict=True)), names), self._longest_worthwhile, limit
        )

    def _search_among(self, restricted: Problem, target: int, limit: float) -> None:
        remaining = modes_within(restricted, target)
        if all(task.modes for task in remaining.tasks):
            solved, program = self._run(remaining, self._steps_to(target), limit)
            if solved.is_found:
                self.offer(_answer(self.problem, remaining, solved, program))

    def _run(self, problem: Problem, steps: Steps, limit: float) -> tuple[Solved, Program]:
        program = self.model.program(problem, steps.target)
        steps.minimise(program.cp, program.times.makespan)
        solved = run_cp_sat(program.cp, replace(self.limits, max_deterministic_time=limit), effort=self.effort)
        self.time_left -= max(solved.solver.deterministic_time, 1e-3)
        return solved, program

    def _steps_to(self, target: int) -> Steps:
        """Return steps from the bound to a target that are fine enough to prove that an answer is within the gap."""
        ticks = max(1, int(_STEP_SHARE * self.limits.tolerance * self.bound))
        return Steps.between(self.bound, target, max(1, min(_STEPS, -(-(target - self.bound) // ticks))))

    def _raise_bound_by(self, solved: Solved, steps: Steps) -> None:
        self._raise_bound(min(steps.proven(solved), steps.target + 1))

    def _raise_bound(self, proven: int) -> None:
        if proven > self.bound:
            self.bound = proven
            self.progress(self.makespan if self.answer else None, self._proven)

    def offer(self, answer: Answer) -> None:
        """Keep an answer, in the shortest period with its order of activities, if that is the shortest so far."""
        picked = picked_modes(self.problem, answer)
        position = {name: index for index, name in enumerate(self.problem.order)}
        order = sorted(position, key=lambda name: (answer.starts[name], position[name]))
        period = shortest_period(self.problem, picked, order)
        if self.answer is None or period.makespan < self.makespan:
            self.answer, self.makespan = replace(answer, starts=period.starts), period.makespan
            self.progress(period.makespan, self._proven)

    def _answer_of(self, incumbent: Incumbent) -> Answer:
        """Return an answer of the local search, whose modes have their own ranks."""
        firsts = (mode.resource.first_rank for mode in incumbent.modes)
        return Answer(
            picked=_indices(self.problem, incumbent.modes),
            first_ranks={task.name: first for task, first in zip(self.problem.tasks, firsts, strict=True)},
            starts=incumbent.period.starts,
        )

    def polish(self) -> None:
        """Give every task the mode with the least work that keeps the makespan, if the model has a local search."""
        if self.answer is None or self.limits.seconds_left <= 0:
            return
        polished = self.model.polished(self.problem, tuple(picked_modes(self.problem, self.answer).values()))
        if polished is not None and polished.period.makespan <= self.makespan:
            self.answer, self.makespan = self._answer_of(polished), polished.period.makespan

    def result(self) -> Result:
        if self.answer is None:
            return self._no_answer()
        return Result(
            status="optimal" if self._proven == self.makespan else "feasible",
            answer=self.answer,
            objective=self.makespan,
            bound=self._proven,
        )

    def _no_answer(self) -> Result:
        """Return the result without an answer: none is short enough, none exists, or none was found in time."""
        if self.bound > self.longest:
            if self.limits.max_makespan is not None:
                return Result.beaten(self.limits.max_makespan)
            return Result(status="infeasible", answer=None, objective=None, bound=0)
        return Result(status="out_of_limit", answer=None, objective=None, bound=self.bound)


def _are_quarter_of_modes(problem: Problem, names: Collection[str]) -> bool:
    """True if these tasks have at least a quarter of all modes."""
    return 4 * sum(len(problem.modes(name)) for name in names) >= _num_modes(problem)


def _num_modes(problem: Problem) -> int:
    return sum(len(task.modes) for task in problem.tasks)


def _ignore_progress(_makespan: int | None, _bound: int) -> None:
    """Ignore progress."""


def _picked(problem: Problem, solved: Solved, program: Program) -> tuple[Mode, ...]:
    """Return the mode of each task that CP-SAT picked."""
    return tuple(
        next(o for index, o in enumerate(task.modes) if solved.solver.value(program.pick[task.name, index]))
        for task in problem.tasks
    )


def _answer(problem: Problem, restricted: Problem, solved: Solved, program: Program) -> Answer:
    """Convert what CP-SAT found among part of the modes to mode indices of the whole problem."""
    modes = _picked(restricted, solved, program)
    by_name = {task.name: mode for task, mode in zip(problem.tasks, modes, strict=True)}
    return Answer(
        picked=_indices(problem, modes),
        first_ranks=program.first_ranks(solved.solver, by_name),
        starts={name: solved.solver.value(start) for name, start in program.times.start.items()},
    )


def _indices(problem: Problem, modes: Sequence[Mode]) -> dict[str, int]:
    """Return the index of each task's mode among its modes."""
    return {task.name: task.modes.index(mode) for task, mode in zip(problem.tasks, modes, strict=True)}
