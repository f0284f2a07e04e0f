"""Small random problems for the solver's tests."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from meshwright.planner.solver.problem import (
    CarriedPrecedence,
    Mode,
    Precedence,
    Problem,
    Resource,
    Run,
    Task,
    Transfer,
)
from meshwright.planner.solver.rank_ranges import swaps
from meshwright.planner.solver.transfer_ticks import TransferTicks


def random_blocks(seed: int, *, num_ranks: int, num_tasks: int, num_modes: int, step: int = 0) -> Problem:
    """A random problem whose modes may be on any block."""
    problem = random_problem(seed, num_ranks=num_ranks, num_tasks=num_tasks, num_modes=num_modes, step=step)
    kept = tuple(Task(c.name, tuple(_first_of_each(c.modes))) for c in problem.tasks)
    return replace(problem, tasks=kept, anywhere=True, range_step=step)


def everywhere(problem: Problem) -> Problem:
    """The same problem with every block as a resource of its own."""
    if not problem.anywhere:
        return problem
    tasks = tuple(
        Task(task.name, tuple(o.at(first) for o in task.modes for first in problem.range_starts(o.resource.num_ranks)))
        for task in problem.tasks
    )
    return replace(problem, anywhere=False, tasks=tasks)


@functools.cache
def without_swaps(seed: int) -> Problem:
    """A random problem in which no ranks are interchangeable: a model leaves out all but one of equal answers."""
    made = (random_problem(1000 * seed + n, num_ranks=4, num_tasks=4, num_modes=3) for n in range(1000))
    return next(problem for problem in made if not swaps(problem))


def only(problem: Problem, picks: Sequence[int]) -> Problem:
    """The problem with the one mode of each task that is picked."""
    return problem.with_tasks(
        tuple(Task(c.name, (c.modes[index],)) for c, index in zip(problem.tasks, picks, strict=True))
    )


def every_choice(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Every choice of one mode for each task, by index."""
    return product(*(range(len(task.modes)) for task in problem.tasks))


def _first_of_each(modes: Iterable[Mode]) -> Iterator[Mode]:
    """The modes, moved to rank 0, each once; of two with copies of different sizes the first stays."""
    shared: dict[Resource, int] = {}
    for mode in dict.fromkeys(mode.at(0) for mode in modes):
        if shared.setdefault(mode.resource, mode.shared_units) == mode.shared_units:
            yield mode


def random_problem(seed: int, *, num_ranks: int, num_tasks: int, num_modes: int, step: int = 0) -> Problem:
    """Tasks over aligned pools, a random order, copies shared by the first two tasks and a refit between them.

    With a `step` pools are any number of steps, or a power of two of ranks within one.

    In half of the problems some tasks are streamed to.
    """
    rng = random.Random(seed)
    names = [f"task{i}" for i in range(num_tasks)]
    tasks = tuple(Task(name, _modes(rng, num_ranks, num_modes, step or num_ranks)) for name in names)
    precedences = [
        Precedence(before, after, rng.randrange(3))
        for i, before in enumerate(names)
        for after in names[i + 1 :]
        if rng.random() < 0.4
    ]
    activities: list[Run | Transfer] = [Run(name=name, task=name) for name in names]
    copies: tuple[tuple[str, ...], ...] = ()
    if rng.random() < 0.7:
        copies = ((names[-1], names[0], names[1]) if num_tasks > 3 else (names[-1], names[0]),)
        for target in copies[0][1:]:
            occupies = rng.choice(("both", "both", "source", "target"))
            ticks = {
                (a, b, n): rng.randrange(5)
                for a in "PQ"
                for b in "PQ"
                for n in range(num_ranks + 1)
                if (a, n) != (b, 0)
            }
            activities.append(
                Transfer(
                    name=f"to {target}",
                    source=names[-1],
                    target=target,
                    occupies=occupies,
                    ticks=TransferTicks.from_mapping(ticks),
                )
            )
            precedences.append(Precedence(f"to {target}", target))
    problem = Problem(
        num_ranks=num_ranks,
        device_units=rng.choice((8, 12, 16, 24, 100)),
        tasks=tasks,
        activities=tuple(activities),
        precedences=tuple(precedences),
        sharing_groups=copies,
    )
    return _streamed(rng, problem) if rng.random() < 0.5 else problem


def random_graph(seed: int) -> Problem:
    """Three to nine tasks on two ranks, one to four roles of which are trained: the tasks of a role may share a copy
    with the last of them, and where they do not one of them is refit from it."""
    rng = random.Random(seed)
    num_tasks = 3 + seed % 7
    names = [f"task{i}" for i in range(num_tasks)]
    num_modes = 4 if num_tasks < 5 else 2
    tasks = tuple(Task(name, _modes(rng, 2, rng.randrange(1, num_modes), 2)) for name in names)
    precedences = [
        Precedence(before, after, rng.randrange(3))
        for i, before in enumerate(names)
        for after in names[i + 1 :]
        if rng.random() < 0.2 + 0.06 * num_tasks
    ]
    roles: list[list[str]] = [[] for _ in range(rng.randrange(1, min(4, num_tasks // 2) + 1))]
    for name in names:
        roles[rng.randrange(len(roles))].append(name)
    copies = tuple((role[-1], *role[:-1]) for role in roles if len(role) > 1)
    moves = []
    for source, target, *_ in copies:
        ticks = {(a, b, n): rng.randrange(5) for a in "PQ" for b in "PQ" for n in range(3) if (a, n) != (b, 0)}
        moves.append(
            Transfer(
                name=f"to {target}",
                source=source,
                target=target,
                occupies="both",
                ticks=TransferTicks.from_mapping(ticks),
            )
        )
        precedences.append(Precedence(f"to {target}", target))
    problem = Problem(
        num_ranks=2,
        device_units=rng.choice((16, 24, 40, 100)),
        tasks=tasks,
        activities=(*(Run(name=name, task=name) for name in names), *moves),
        precedences=tuple(precedences),
        sharing_groups=copies,
    )
    return _streamed(rng, problem) if rng.random() < 0.5 else problem


def _streamed(rng: random.Random, problem: Problem) -> Problem:
    """The problem with some of the waits between runs streamed, and modes that may start early."""
    runs = {task.name for task in problem.tasks}
    tasks = tuple(
        Task(task.name, tuple(replace(o, early_ticks=rng.randrange(o.ticks + 1)) for o in task.modes))
        for task in problem.tasks
    )
    precedences = tuple(
        p._replace(streamed=p.before in runs and p.after in runs and rng.random() < 0.6) for p in problem.precedences
    )
    return replace(problem, tasks=tasks, precedences=precedences)


def with_carried(seed: int, problem: Problem) -> Problem:
    """The problem with some hand-overs to later turns, and modes that hand over late."""
    rng = random.Random(seed)
    runs = [task.name for task in problem.tasks]
    tasks = tuple(
        Task(task.name, tuple(replace(o, late_ticks=rng.choice((0, 0, rng.randrange(15)))) for o in task.modes))
        for task in problem.tasks
    )
    precedences = tuple(p._replace(late=p.before in runs and rng.random() < 0.3) for p in problem.precedences)
    carried = tuple(
        CarriedPrecedence(*rng.sample(runs, 2), rng.choice((1, 1, 2)), rng.randrange(-2, 20), rng.random() < 0.5)
        for _ in range(rng.randrange(1, 4))
    )
    return replace(problem, tasks=tasks, precedences=precedences, carried=carried)


def _modes(rng: random.Random, num_ranks: int, num_modes: int, step: int) -> tuple[Mode, ...]:
    """All positions of a few random sizes, so that ranks are interchangeable as in a real cluster."""
    sizes = [2**k for k in range(step.bit_length()) if 2**k < step] + [*range(step, num_ranks + 1, step)]
    found = []
    while len(found) < num_modes:
        size, layout, shared = rng.choice(sizes), rng.choice("PQ"), rng.randrange(4)
        ticks, resident, transient = rng.randrange(1, 12), rng.randrange(6), rng.randrange(6)
        every = range(0, num_ranks - size + 1, min(size, step))
        firsts = every if rng.random() < 0.6 else [rng.choice(every)]
        for first in firsts:
            resource = Resource(first, size, layout)
            known = next((o.shared_units for o in found if o.resource == resource), shared)
            found.append(
                Mode(
                    resource=resource,
                    ticks=ticks,
                    resident_units=resident + known,
                    shared_units=known,
                    transient_units=transient,
                )
            )
    return tuple(found)
