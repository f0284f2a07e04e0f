"""The search for the best answer to a problem, and its proof.

    incumbent  = the best of several descents, from fixed and from seeded starts
    problem    = without the options that cannot beat the incumbent
    incumbent  = descents in pairs of calls, near the linear relaxation's answer
    problem    = without the options that cannot beat the incumbent
    answer     = what CP-SAT finds there; if there is nothing, the incumbent is proven

Every step is deterministic.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.planner.solver.bounds import within
from meshwright.planner.solver.descent import descend, descend_in_pairs
from meshwright.planner.solver.greedy import Greedy, Picks, Score
from meshwright.planner.solver.model import Solved, makespan_model, memory_model, run
from meshwright.planner.solver.problem import Call, Option, Problem
from meshwright.planner.solver.reduce import num_options, reduced
from meshwright.planner.solver.relaxation import Relaxation
from meshwright.planner.solver.result import Answer, Limits, Progress, Result
from meshwright.planner.solver.variables import Variables

_RANDOM_STARTS = 4
_NEAR = 20
"""Options per call that descents in pairs try: those whose reduced cost is least."""


@dataclass(frozen=True)
class _Incumbent:
    """The best choice so far, whatever problem it was found in, with the start of each task."""

    options: tuple[Option, ...]
    makespan: int
    starts: dict[str, int]


def solve(problem: Problem, limits: Limits, progress: Progress | None = None) -> Result:
    """The best answer within the limits, with the bound that was proven."""
    if not num_options(problem):
        return Result(status="infeasible", answer=None, objective=None, bound=0)
    incumbent = _descents(problem, limits) or _least_memory_start(problem, limits)
    if isinstance(incumbent, Result):
        return incumbent
    tell = progress or (lambda _makespan, _bound: None)
    tell(incumbent.makespan, 0)
    incumbent = _near_relaxation(within(problem, incumbent.makespan), incumbent)
    incumbent = _polished(problem, incumbent)
    tell(incumbent.makespan, 0)
    return _proven(problem, incumbent, limits, progress)


def least_memory(problem: Problem, limits: Limits) -> int | None:
    """The least blocks a device can have so that some choice of options fits, whatever its duration.

    None when a call has no option. The limits may cut the search short; the answer is then still one that fits.
    """
    if not num_options(problem):
        return None
    model, _, device = memory_model(problem)
    solved = run(model, limits)
    return solved.solver.value(device) if solved.is_found else None


def _descents(problem: Problem, limits: Limits) -> _Incumbent | None:
    """The best that descents find, or None when none of them fits in memory."""
    greedy = Greedy(problem)
    found = [descend(greedy, start, greedy.score(start)) for start in _starts(problem, limits.seed)]
    picks, score = min(found, key=lambda pair: pair[1])
    return _incumbent(greedy, picks, score) if score.excess_blocks == 0 else None


def _starts(problem: Problem, seed: int) -> Iterator[Picks]:
    """The fastest options, the smallest, and some at random."""
    yield tuple(min(range(len(c.options)), key=lambda i: c.options[i].ticks) for c in problem.calls)
    yield tuple(min(range(len(c.options)), key=lambda i: _peak(c.options[i])) for c in problem.calls)
    rng = random.Random(seed)
    for _ in range(_RANDOM_STARTS):
        yield tuple(rng.randrange(len(c.options)) for c in problem.calls)


def _least_memory_start(problem: Problem, limits: Limits) -> _Incumbent | Result:
    """A descent from the choice that needs the least memory, or the result that there is none."""
    model, x, device = memory_model(problem)
    solved = run(model, limits)
    if solved.is_found and solved.solver.value(device) <= problem.device_blocks:
        greedy, picks = Greedy(problem), _picks(solved, problem, x)
        return _incumbent(greedy, *descend(greedy, picks, greedy.score(picks)))
    is_proven = solved.is_proven or solved.solver.best_objective_bound > problem.device_blocks
    return Result(status="infeasible" if is_proven else "out_of_limit", answer=None, objective=None, bound=0)


def _near_relaxation(problem: Problem, incumbent: _Incumbent) -> _Incumbent:
    """The better of the incumbent and what descents in pairs find near the relaxation's answer."""
    model, x = makespan_model(problem)
    relaxed = Relaxation(model, x.makespan).solve()
    if relaxed is None:
        return incumbent
    greedy = Greedy(problem)
    variables = [[x.pick[c.name, i].index for i in range(len(c.options))] for c in problem.calls]
    near = [sorted(range(len(v)), key=lambda i: relaxed.reduced_costs[v[i]])[:_NEAR] for v in variables]
    rounded = tuple(max(range(len(v)), key=lambda i: relaxed.values[v[i]]) for v in variables)
    kept = _indices(problem, incumbent.options)
    starts = [descend(greedy, start, greedy.score(start)) for start in (kept, rounded)]
    picks, score = min(starts, key=lambda pair: pair[1])
    return _incumbent(greedy, *descend_in_pairs(greedy, picks, score, near))


def _polished(problem: Problem, incumbent: _Incumbent) -> _Incumbent:
    """The incumbent with every call that does not matter for the makespan at its least work."""
    greedy, picks = Greedy(problem), _indices(problem, incumbent.options)
    return _incumbent(greedy, *descend(greedy, picks, greedy.score(picks)))


def _proven(problem: Problem, incumbent: _Incumbent, limits: Limits, progress: Progress | None) -> Result:
    """The incumbent with its proof, or a better answer."""
    smaller = reduced(problem, incumbent.makespan - 1)
    if not num_options(smaller):
        return _result(problem, incumbent, incumbent.makespan)
    model, x = makespan_model(smaller)
    model.add(x.makespan <= incumbent.makespan - 1)
    solved = run(model, limits, progress)
    if solved.is_found:
        starts = {task.name: solved.solver.value(x.start[task.name]) for task in smaller.tasks}
        options = _options(smaller, _picks(solved, smaller, x))
        incumbent = _Incumbent(options, solved.solver.value(x.makespan), starts)
    if solved.is_proven:
        return _result(problem, incumbent, incumbent.makespan)
    relaxed = Relaxation(model, x.makespan).solve()
    bounds = [round(solved.solver.best_objective_bound), relaxed.bound if relaxed else 0]
    return _result(problem, incumbent, min(max(bounds), incumbent.makespan))


def _result(problem: Problem, incumbent: _Incumbent, bound: int) -> Result:
    picks = _indices(problem, incumbent.options)
    return Result(
        status="optimal" if bound == incumbent.makespan else "feasible",
        answer=Answer(
            picked=dict(zip((call.name for call in problem.calls), picks, strict=True)), starts=incumbent.starts
        ),
        objective=incumbent.makespan,
        bound=bound,
    )


def _incumbent(greedy: Greedy, picks: Picks, score: Score) -> _Incumbent:
    options = tuple(options[index] for options, index in zip(greedy.options, picks, strict=True))
    return _Incumbent(options, score.makespan, greedy.starts(picks))


def _picks(solved: Solved, problem: Problem, x: Variables) -> Picks:
    def picked(call: Call) -> int:
        return next(i for i in range(len(call.options)) if solved.solver.value(x.pick[call.name, i]))

    return tuple(picked(call) for call in problem.calls)


def _options(problem: Problem, picks: Picks) -> tuple[Option, ...]:
    return tuple(call.options[index] for call, index in zip(problem.calls, picks, strict=True))


def _indices(problem: Problem, options: tuple[Option, ...]) -> Picks:
    return tuple(call.options.index(option) for call, option in zip(problem.calls, options, strict=True))


def _peak(option: Option) -> int:
    return option.resident_blocks + option.transient_blocks
