"""The search when calls may be anywhere, and its proof.

    answer     = the best of a few options per call, where no other is known
    bound      = of the problem in which few options stand in for all of a short call (`coarse.py`)
    answer     = the best of those like the best there; often that is all
    repeat
        aim    = a stride further than the bound; strides grow
        for each branch of the problem (`branches.py`), with memory and times in coarse parts and few layouts, then more
        and all layouts, and last as it is
            repeat while that makes the answer better
                target     = the aim, or what is better than the answer by more than the gap asked
                problem    = without the options that cannot meet the target, the others rounded down to whole parts
                bound      = what CP-SAT proves of it, in coarse steps of the makespan
                answer     = the best within the target of the options that are like those that it picked there
                answer     = where that was not enough, and layouts were few, the best of all on as many ranks, even
                             beyond the aim if it is within the gap of the bound
    until the gap is reached, or the limit is

The further a target lies above the bound of the linear program, the more options may meet it: what is found near the
bound leaves little to be proven, and what is not there is proven with few. Everything is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from meshwright.planner.solver.block_model import Relations, block_makespan_model
from meshwright.planner.solver.blocks import first_ranks
from meshwright.planner.solver.bounds import least_makespan, within
from meshwright.planner.solver.branches import Branch, branches
from meshwright.planner.solver.coarse import (
    around,
    coarsened,
    fastest_few,
    like,
    possible,
    short_calls,
    with_stand_ins,
)
from meshwright.planner.solver.coarse_steps import Steps
from meshwright.planner.solver.place_model import Solved, run
from meshwright.planner.solver.problem import Option, Problem, shortest_turn
from meshwright.planner.solver.result import Answer, Effort, Limits, Progress, Result, picked_options
from meshwright.planner.solver.variables import TaskVariables

_STEPS = 64
"""Into how many steps CP-SAT cuts the makespans that it looks at."""

_FIRST_TIME = 4.0
"""Deterministic time for a first answer."""

_FIRST_RANGE = 4
"""A first answer is looked for within so many times the bound, and only then without a limit."""

_PARTS = 64
"""Of a device: memory is counted in these at first."""

_APART = (2, 1 / 8)
"""Layouts whose transfers differ by less than so many times the gap that is asked are one, at first and then: a model's
size goes with its pairs of layouts, and most transfers are short beside a turn."""

_MANY = 700
"""Options in all: of so many CP-SAT takes longer to prove a bound than of all with fewer layouts and then of these."""

_STRIDE, _FURTHER = 0.01, 1.5
"""Of what is proven: the first round of the search aims so much further, or by the gap that is asked where that is
more; and each round by so many times as much as the one before it."""

_SHORT, _FINER = 2, 2
"""Calls that take less of the bound than so many times the gap that is asked are told by stand-ins, in a problem that
is solved to a gap so many times finer."""

_TICKS_PER_GAP = 128
"""Times are rounded to this part of the gap that is asked: a turn of ten tasks in line loses a tenth of it at most."""


def search(problem: Problem, limits: Limits, progress: Progress, effort: Effort | None = None) -> Result:
    """The best answer within the limits, with the bound that was proven; every call has options.

    What it takes is added to `effort`.
    """
    best = _Best(problem, limits, progress, effort or Effort())
    remaining = possible(problem)
    if any(not call.options for call in remaining.calls):
        return Result(status="infeasible", answer=None, objective=None, bound=0)
    best.bound = least_makespan(remaining)
    if limits.most is None:
        best.find(fastest_few(remaining))
    best.by_stand_ins(remaining)
    best.by_branches(remaining)
    if best.aside:
        best.offer(best.aside)
    return best.result()


def first_answer(problem: Problem, limits: Limits, effort: Effort) -> Result | None:
    """The best answer among a few options per call; none where there is none."""
    best = _Best(problem, limits, _silence, effort)
    remaining = possible(problem)
    if any(not call.options for call in remaining.calls):
        return None
    best.bound = least_makespan(remaining)
    best.find(fastest_few(remaining))
    return best.result() if best.answer else None


@dataclass
class _Best:
    """The best answer so far, what is proven of it, and the time that is left.

    `bound` is of the branch that is looked at, `elsewhere` the least of all others; `aside` is an answer that is not
    looked at meanwhile. Where it `is_rough` any answer within the gap serves as well as a shorter one.
    """

    problem: Problem
    limits: Limits
    progress: Progress
    effort: Effort
    bound: int = 0
    elsewhere: int | None = None
    makespan: int = 0
    answer: Answer | None = None
    aside: Answer | None = None
    aim: int | None = None
    is_rough: bool = False
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.limits.max_deterministic_time

    @property
    def target(self) -> int:
        """The largest makespan that is asked for, and better than the answer by more than the gap asked."""
        most = self.longest if self.answer is None else self.limits.target(self.makespan)
        return most if self.aim is None else min(most, self.aim)

    @property
    def _enough(self) -> int:
        """The largest makespan of a better answer that is within the target, or not longer than what is proven by more
        than the gap asked."""
        most = self.longest if self.answer is None else min(self.longest, self.makespan - 1)
        return min(most, max(self.target, self.limits.as_short(self.bound)))

    @property
    def longest(self) -> int:
        """The largest makespan that is asked for; all answers are within it where none is."""
        return self.problem.horizon if self.limits.most is None else self.limits.most

    @property
    def is_open(self) -> bool:
        """Whether there is time, and an answer within the target is not excluded."""
        in_time = self.left > 0 and self.limits.seconds_left > 0
        return in_time and self.bound <= self.target

    @property
    def _grain(self) -> int:
        """Ticks to which times may be rounded without much harm to a bound."""
        return max(1, int(self.limits.tolerance * self.bound) // _TICKS_PER_GAP)

    @property
    def _proven(self) -> int:
        """The bound on what was asked for, or the answer where that is shorter."""
        bound = self.bound if self.elsewhere is None else min(self.bound, self.elsewhere)
        return min(bound, self.makespan) if self.answer else bound

    def left_of(self, problem: Problem) -> Problem:
        """The problem without the options that cannot meet the target; when a call has none left, nothing can."""
        target = self.target
        left = within(problem, target)
        least = least_makespan(left) if all(call.options for call in left.calls) else target + 1
        self._raise_bound(min(least, target + 1))
        return left

    def find(self, few: Problem) -> None:
        """Looks for a first answer among a few options, whatever time is left."""
        most = self.target
        for target in (min(_FIRST_RANGE * self.bound, most), most):
            if self.answer is None and self.is_open:
                self._look(few, max(target, self.bound), _FIRST_TIME)
        if self.answer is not None and self.is_open:
            self._look(few, self.target, self.left)

    def by_stand_ins(self, problem: Problem) -> None:
        """Looks at the problem with one option for each number of ranks in place of all of a short call, and then for
        an answer on as many ranks as are best there."""
        short = short_calls(problem, _SHORT * self.limits.tolerance * self.bound)
        if not self.is_open or not _are_many(problem, short):
            return
        problem = self.left_of(problem)
        if not self.is_open:
            return
        limits = replace(self.limits, gap=self.limits.tolerance / _FINER, most=self.target)
        stand_ins = with_stand_ins(problem, short)
        least = _Best(stand_ins, limits, _silence, self.effort, self.bound, is_rough=True)
        least.by_branches(least.problem)
        self.left -= limits.max_deterministic_time - least.left
        found = least.result()
        self._raise_bound(min(found.bound, self.target + 1))
        if found.answer is not None and self.is_open:
            known, near = self.answer, like(problem, picked_options(least.problem, found.answer), short)
            self._look(near, self.target, self.left)
            if (
                self.is_open and self.answer is not known
            ):  # what is only a little shorter than it would be hard to exclude
                self.aside, self.answer = self.answer, None

    def by_branches(self, problem: Problem) -> None:
        """Looks at all branches in rounds, each with an aim: a round that finds no answer proves that there is none."""
        problem = self.left_of(problem)
        if not self.is_open:
            return
        least, last = self.bound, self.target
        every = branches(problem, last, lambda: self.limits.seconds_left > 0)
        proven = [max(least, branch.bound) for branch in every]
        stride = max(self.limits.tolerance, _STRIDE) * min(proven, default=0)
        while proven and self.limits.seconds_left > 0 and self.left > 0:
            self.aim = min(proven) + math.ceil(stride)
            stride *= _FURTHER
            if min(proven) > self.target:
                break
            for position, branch in enumerate(every):
                self.bound = proven[position]
                self.elsewhere = min([last + 1, *proven[:position], *proven[position + 1 :]])
                if self.is_open:
                    self._prove(branch)
                proven[position] = self.bound
        self.bound, self.elsewhere, self.aim = min([last + 1, *proven]), None, None

    def _prove(self, branch: Branch) -> None:
        """Looks for better answers until none is left, or no time."""
        problem = branch.within(self.target)
        for gaps in _APART:
            apart = int(self.limits.tolerance * self.bound * gaps)
            if apart and self._has_many(problem):
                problem = self._narrow(branch, problem, apart)
        problem = self._narrow(branch, problem)
        while self.is_open:
            problem = self.left_of(problem)
            if self.is_open:
                self._finish(problem)

    def _has_many(self, problem: Problem) -> bool:
        """Whether so many options are left in coarse parts that a bound with fewer layouts is worth its own search."""
        if not self.is_open:
            return False
        coarse = coarsened(self.left_of(problem), parts=_PARTS, ticks=self._grain).problem
        return _num_options(coarse) > _MANY

    def _narrow(self, branch: Branch, problem: Problem, apart: int = 0) -> Problem:
        """What is left of the branch's problem when neither the bound nor the answer gets better in coarse parts."""
        is_better = True
        while self.is_open and is_better:
            problem, known = self.left_of(problem), self.answer
            if not self.is_open:
                break
            coarse = coarsened(problem, parts=_PARTS, ticks=self._grain, apart=apart)
            before = self.left
            picked = self._bound_by(coarse.problem)
            taken = before - self.left
            if picked and self.is_open:
                self._look(around(problem, picked, coarse), self.target, self.left)
            if picked and self.is_open and (apart or self.is_rough):  # of fewer options the rest is soon proven
                self._look_further(branch.within(self._enough), picked, min(taken, self.left))
            is_better = self.answer is not known
        return problem

    def _bound_by(self, outer: Problem) -> tuple[Option, ...]:
        """Learns the bound from a problem in which every answer has one; the options of the best there, if there is."""
        steps = Steps.between(self.bound, self.target, _STEPS)
        solved, x, _ = self._run(outer, steps, self.left)
        self._learn(solved, steps)
        return _chosen(outer, solved, x) if solved.is_found else ()

    def _finish(self, problem: Problem) -> None:
        """Looks for a better answer among all options that can be part of one, and learns the bound."""
        steps = Steps.between(self.bound, self.target, _STEPS)
        solved, x, times = self._run(problem, steps, self.left)
        if solved.is_found:
            self.offer(_answer(self.problem, problem, solved, x, times))
        self._learn(solved, steps)

    def _look_further(self, problem: Problem, picked: Sequence[Option], limit: float) -> None:
        """Looks at all layouts on as many ranks as those picked for what would be enough, even beyond the aim: to prove
        that nothing lies between the bound and an aim just below an answer takes longer than to find that answer."""
        names = [call.name for call in problem.calls]
        self._look(like(problem, dict(zip(names, picked, strict=True)), names), self._enough, limit)

    def _look(self, few: Problem, target: int, limit: float) -> None:
        left = within(few, target)
        if all(call.options for call in left.calls):
            solved, x, times = self._run(left, Steps.between(self.bound, target, _STEPS), limit)
            if solved.is_found:
                self.offer(_answer(self.problem, left, solved, x, times))

    def _run(self, problem: Problem, steps: Steps, limit: float) -> tuple[Solved, Relations, TaskVariables]:
        model, x, times = block_makespan_model(problem, steps.target)
        steps.minimise(model, times.makespan)
        solved = run(model, replace(self.limits, max_deterministic_time=limit), effort=self.effort)
        self.left -= max(solved.solver.deterministic_time, 1e-3)
        return solved, x, times

    def _learn(self, solved: Solved, steps: Steps) -> None:
        self._raise_bound(min(steps.proven(solved), steps.target + 1))

    def _raise_bound(self, proven: int) -> None:
        if proven > self.bound:
            self.bound = proven
            self.progress(self.makespan if self.answer else None, self._proven)

    def offer(self, answer: Answer) -> None:
        picked = picked_options(self.problem, answer)
        position = {name: index for index, name in enumerate(self.problem.order)}
        order = sorted(position, key=lambda name: (answer.starts[name], position[name]))
        turn = shortest_turn(self.problem, picked, order)
        if self.answer is None or turn.makespan < self.makespan:
            self.answer, self.makespan = replace(answer, starts=turn.starts), turn.makespan
            self.progress(turn.makespan, self._proven)

    def result(self) -> Result:
        if self.answer is None:
            return self._nothing()
        return Result(
            status="optimal" if self._proven == self.makespan else "feasible",
            answer=self.answer,
            objective=self.makespan,
            bound=self._proven,
        )

    def _nothing(self) -> Result:
        """No answer: none is short enough, none exists, or none was found in time."""
        if self.bound > self.longest:
            if self.limits.most is not None:
                return Result.beaten(self.limits.most)
            return Result(status="infeasible", answer=None, objective=None, bound=0)
        return Result(status="out_of_limit", answer=None, objective=None, bound=self.bound)


def _are_many(problem: Problem, names: Collection[str]) -> bool:
    """Whether these calls have a quarter of the options or more."""
    return 4 * sum(len(problem.options(name)) for name in names) >= _num_options(problem)


def _num_options(problem: Problem) -> int:
    return sum(len(call.options) for call in problem.calls)


def _silence(_makespan: int | None, _bound: int) -> None:
    """Tells no one."""


def _chosen(problem: Problem, solved: Solved, x: Relations) -> tuple[Option, ...]:
    """The option of each call that CP-SAT picked."""
    return tuple(
        next(o for index, o in enumerate(call.options) if solved.solver.value(x.pick[call.name, index]))
        for call in problem.calls
    )


def _answer(problem: Problem, part: Problem, solved: Solved, x: Relations, times: TaskVariables) -> Answer:
    """What CP-SAT found for a part of the options, in the indices of all."""
    value, chosen = solved.solver.value, _chosen(part, solved, x)
    picked = {call.name: call.options.index(option) for call, option in zip(problem.calls, chosen, strict=True)}
    sizes = {call.name: call.options[picked[call.name]].place.num_ranks for call in problem.calls}
    inside = {pair: bool(value(variable)) for pair, variable in x.blocks.inside.items()}
    return Answer(
        picked=picked,
        first_ranks=first_ranks(sizes, inside),
        starts={name: value(start) for name, start in times.start.items()},
    )
