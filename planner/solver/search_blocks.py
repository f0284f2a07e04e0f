"""The search when calls may be anywhere, and its proof.

    answer     = the best of a few options per call
    repeat
        target     = what is better than the answer by more than the gap asked
        problem    = without the options that cannot meet the target
        answer     = what CP-SAT finds within the target, in coarse steps of the makespan
        bound      = what CP-SAT proved
    until the gap is reached, or the limit is

Everything is deterministic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from meshwright.planner.solver.block_model import Relations, block_makespan_model
from meshwright.planner.solver.blocks import first_ranks
from meshwright.planner.solver.bounds import least_makespan, within
from meshwright.planner.solver.model import Solved, run
from meshwright.planner.solver.problem import Call, Option, Place, Problem, Run, ends_of
from meshwright.planner.solver.result import Answer, Limits, Progress, Result, picked_options
from meshwright.planner.solver.steps import Steps
from meshwright.planner.solver.variables import TaskVariables

_FIRST_STEPS, _STEPS = 64, 16
"""Into how many steps CP-SAT cuts the makespans that it looks at, for a first answer and then."""

_PARTS = 8
"""Of a device: in each a few options are chosen for a first answer."""

_FIRST_TIME = 4.0
"""Deterministic time for a first answer."""

_FIRST_RANGE = 4
"""A first answer is looked for within so many times the bound, and only then without a limit."""


def search(problem: Problem, limits: Limits, progress: Progress) -> Result:
    """The best answer within the limits, with the bound that was proven; every call has options."""
    best = _Best(problem, limits, progress)
    remaining = _possible(problem)
    if any(not call.options for call in remaining.calls):
        return Result(status="infeasible", answer=None, objective=None, bound=0)
    best.bound = least_makespan(remaining)
    best.find(_few(remaining))
    while best.is_open:
        target = remaining.horizon if best.target is None else best.target
        remaining = within(remaining, target)
        if any(not call.options for call in remaining.calls):
            best.bound = target + 1
            break
        best.bound = max(best.bound, min(least_makespan(remaining), target + 1))
        if best.is_open:
            best.improve(remaining, target)
    return best.result()


@dataclass
class _Best:
    """The best answer so far, what is proven of it, and the time that is left."""

    problem: Problem
    limits: Limits
    progress: Progress
    bound: int = 0
    makespan: int = 0
    answer: Answer | None = None
    is_infeasible: bool = False
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.limits.max_deterministic_time

    @property
    def target(self) -> int | None:
        """The largest makespan that is better by more than the gap asked, than the answer or than what is asked."""
        known = self.limits.below if self.answer is None else self.makespan
        return None if known is None else self.limits.target(known)

    @property
    def is_open(self) -> bool:
        """Whether there is time, and an answer within the target is not excluded."""
        return self.left > 0 and not self.is_infeasible and (self.target is None or self.bound <= self.target)

    def find(self, few: Problem) -> None:
        """Looks for a first answer among a few options, whatever time is left."""
        most = few.horizon if self.target is None else self.target
        for target in (min(_FIRST_RANGE * self.bound, most), most):
            if self.answer is None and self.is_open:
                self._look(few, max(target, self.bound), _FIRST_TIME)
        if self.answer is not None and self.target is not None and self.is_open:
            self._look(few, self.target, self.left)

    def _look(self, few: Problem, target: int, limit: float) -> None:
        """Looks for an answer within the target, without a proof."""
        left = within(few, target)
        if all(call.options for call in left.calls):
            self._run(left, Steps.between(self.bound, target, _FIRST_STEPS), limit)

    def improve(self, problem: Problem, target: int) -> None:
        """Looks for an answer within the target among all options that can be part of one, and learns the bound."""
        steps = Steps.between(self.bound, target, _STEPS)
        solved = self._run(problem, steps, self.left)
        self.is_infeasible = self.answer is None and solved.is_proven
        self.bound = max(self.bound, min(steps.proven(solved), target + 1))

    def _run(self, problem: Problem, steps: Steps, limit: float) -> Solved:
        model, x, times = block_makespan_model(problem, steps.target)
        steps.minimise(model, times.makespan)
        solved = run(model, replace(self.limits, max_deterministic_time=limit))
        self.left -= max(solved.solver.deterministic_time, 1e-3)
        if solved.is_found:
            self._offer(_answer(self.problem, problem, solved, x, times))
        return solved

    def _offer(self, answer: Answer) -> None:
        picked = picked_options(self.problem, answer)
        position = {name: index for index, name in enumerate(self.problem.order)}
        ends = ends_of(self.problem, picked, sorted(position, key=lambda name: (answer.starts[name], position[name])))
        makespan = max(ends.values())
        if self.answer is None or makespan < self.makespan:
            tasks = {task.name: task for task in self.problem.tasks}
            starts = {name: end - self.problem.duration(tasks[name], picked) for name, end in ends.items()}
            self.answer, self.makespan = replace(answer, starts=starts), makespan
            self.progress(makespan, min(self.bound, makespan))

    def result(self) -> Result:
        if self.answer is None:
            return self._nothing()
        bound = min(self.bound, self.makespan)
        return Result(
            status="optimal" if bound == self.makespan else "feasible",
            answer=self.answer,
            objective=self.makespan,
            bound=bound,
        )

    def _nothing(self) -> Result:
        """No answer: none is short enough, none exists, or none was found in time."""
        if self.target is not None and (self.is_infeasible or self.bound > self.target):
            return Result(status="beaten", answer=None, objective=None, bound=self.target + 1)
        if self.is_infeasible:
            return Result(status="infeasible", answer=None, objective=None, bound=0)
        return Result(status="out_of_limit", answer=None, objective=None, bound=self.bound)


def _answer(problem: Problem, part: Problem, solved: Solved, x: Relations, times: TaskVariables) -> Answer:
    """What CP-SAT found for a part of the options, in the indices of all."""
    value = solved.solver.value
    picked = {}
    for whole, call in zip(problem.calls, part.calls, strict=True):
        chosen = next(o for index, o in enumerate(call.options) if value(x.pick[call.name, index]))
        picked[call.name] = whole.options.index(chosen)
    sizes = {call.name: call.options[picked[call.name]].place.num_ranks for call in problem.calls}
    inside = {pair: bool(value(variable)) for pair, variable in x.blocks.inside.items()}
    return Answer(
        picked=picked,
        first_ranks=first_ranks(sizes, inside),
        starts={name: value(start) for name, start in times.start.items()},
    )


def _possible(problem: Problem) -> Problem:
    """The problem without options that are alone too large, or that another can always stand in for."""
    calls = []
    for call in problem.calls:
        room = problem.num_ranks - _least_ranks_of_producers(problem, call.name)
        fitting = [o for o in call.options if _memory(o) <= problem.device_blocks]
        groups: dict[Place | None, list[Option]] = {}
        for option in fitting:
            groups.setdefault(option.place if call.name in problem.tied else None, []).append(option)
        calls.append(Call(call.name, tuple(o for same in groups.values() for o in _undominated(same, room))))
    return problem.with_calls(tuple(calls))


def _least_ranks_of_producers(problem: Problem, call: str) -> int:
    """The ranks that what streams to a call has at least, whichever of it is the smallest."""
    run = {task.name: task.call for task in problem.tasks if isinstance(task, Run)}
    before = {run[p.before] for p in problem.precedences if p.streamed and run[p.after] == call and p.before in run}
    sizes = [min((o.place.num_ranks for o in problem.options(name)), default=0) for name in before]
    return min(sizes, default=problem.num_ranks)


def _undominated(options: Iterable[Option], room: int) -> tuple[Option, ...]:
    """The options that no other beats in ranks, ticks, early ticks and memory; of equals the first stays.

    A smaller block can always take the place of a larger one, inside it. Of options with more ranks than `room` none
    can start early, as they meet all that streams to them.
    """
    kept: list[tuple[tuple[int, ...], Option]] = []
    for amounts, option in sorted(((_amounts(o, room), o) for o in options), key=lambda pair: pair[0]):
        if not any(all(a <= b for a, b in zip(other, amounts, strict=True)) for other, _ in kept):
            kept.append((amounts, option))
    return tuple(option for _, option in kept)


def _amounts(option: Option, room: int) -> tuple[int, ...]:
    """What has to be small."""
    early = option.early_ticks if option.place.num_ranks <= room else 0
    memory = option.resident_blocks, option.transient_blocks
    return option.place.num_ranks, option.ticks, option.ticks - early, *memory


def _few(problem: Problem) -> Problem:
    """The problem with a few options of each size per call: the smallest, the fastest in each part of a device."""

    def few(call: Call) -> tuple[Option, ...]:
        chosen: set[Option] = set()
        by_size: dict[int, list[Option]] = {}
        for option in call.options:
            by_size.setdefault(option.place.num_ranks, []).append(option)
        for same in by_size.values():
            chosen.add(min(same, key=_memory))
            for part in range(1, _PARTS + 1):
                within_part = [option for option in same if _memory(option) * _PARTS <= problem.device_blocks * part]
                chosen.update(sorted(within_part, key=lambda option: option.ticks)[:1])
        return tuple(option for option in call.options if option in chosen)

    return problem.with_calls(tuple(Call(call.name, few(call)) for call in problem.calls))


def _memory(option: Option) -> int:
    return option.resident_blocks + option.transient_blocks
