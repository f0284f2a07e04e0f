"""Small random problems for the solver's tests."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from meshwright.planner.solver.problem import (
    CallOptions,
    CallRun,
    CarriedPrecedence,
    Option,
    Place,
    Precedence,
    Problem,
    Transfer,
)
from meshwright.planner.solver.rank_ranges import swaps


def random_blocks(seed: int, *, num_ranks: int, num_calls: int, num_options: int, step: int = 0) -> Problem:
    """A random problem whose options may be on any block."""
    problem = random_problem(seed, num_ranks=num_ranks, num_calls=num_calls, num_options=num_options, step=step)
    kept = tuple(CallOptions(c.name, tuple(_first_of_each(c.options))) for c in problem.calls)
    return replace(problem, calls=kept, anywhere=True, range_step=step)


def everywhere(problem: Problem) -> Problem:
    """The same problem with every block as a place of its own."""
    if not problem.anywhere:
        return problem
    calls = tuple(
        CallOptions(
            call.name, tuple(o.at(first) for o in call.options for first in problem.range_starts(o.place.num_ranks))
        )
        for call in problem.calls
    )
    return replace(problem, anywhere=False, calls=calls)


@functools.cache
def without_swaps(seed: int) -> Problem:
    """A random problem in which no ranks are interchangeable: a model leaves out all but one of equal answers."""
    made = (random_problem(1000 * seed + n, num_ranks=4, num_calls=4, num_options=3) for n in range(1000))
    return next(problem for problem in made if not swaps(problem))


def only(problem: Problem, picks: Sequence[int]) -> Problem:
    """The problem with the one option of each call that is picked."""
    return problem.with_calls(
        tuple(CallOptions(c.name, (c.options[index],)) for c, index in zip(problem.calls, picks, strict=True))
    )


def every_choice(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Every choice of one option for each call, by index."""
    return product(*(range(len(call.options)) for call in problem.calls))


def _first_of_each(options: Iterable[Option]) -> Iterator[Option]:
    """The options, moved to rank 0, each once; of two with copies of different sizes the first stays."""
    shared: dict[Place, int] = {}
    for option in dict.fromkeys(option.at(0) for option in options):
        if shared.setdefault(option.place, option.shared_units) == option.shared_units:
            yield option


def random_problem(seed: int, *, num_ranks: int, num_calls: int, num_options: int, step: int = 0) -> Problem:
    """Calls over aligned pools, a random order, copies shared by the first two calls and a refit between them.

    With a `step` pools are any number of steps, or a power of two of ranks within one.

    In half of the problems some calls are streamed to.
    """
    rng = random.Random(seed)
    names = [f"call{i}" for i in range(num_calls)]
    calls = tuple(CallOptions(name, _options(rng, num_ranks, num_options, step or num_ranks)) for name in names)
    precedences = [
        Precedence(before, after, rng.randrange(3))
        for i, before in enumerate(names)
        for after in names[i + 1 :]
        if rng.random() < 0.4
    ]
    tasks: list[CallRun | Transfer] = [CallRun(name=name, call=name) for name in names]
    copies: tuple[tuple[str, ...], ...] = ()
    if rng.random() < 0.7:
        copies = ((names[-1], names[0], names[1]) if num_calls > 3 else (names[-1], names[0]),)
        for target in copies[0][1:]:
            occupies = rng.choice(("both", "both", "source", "target"))
            ticks = {
                (a, b, n): rng.randrange(5)
                for a in "PQ"
                for b in "PQ"
                for n in range(num_ranks + 1)
                if (a, n) != (b, 0)
            }
            tasks.append(Transfer(name=f"to {target}", source=names[-1], target=target, occupies=occupies, ticks=ticks))
            precedences.append(Precedence(f"to {target}", target))
    problem = Problem(
        num_ranks=num_ranks,
        device_units=rng.choice((8, 12, 16, 24, 100)),
        calls=calls,
        tasks=tuple(tasks),
        precedences=tuple(precedences),
        sharing_groups=copies,
    )
    return _streamed(rng, problem) if rng.random() < 0.5 else problem


def random_graph(seed: int) -> Problem:
    """Three to nine calls on two ranks, one to four roles of which are trained: the calls of a role may share a copy
    with the last of them, and where they do not one of them is refit from it."""
    rng = random.Random(seed)
    num_calls = 3 + seed % 7
    names = [f"call{i}" for i in range(num_calls)]
    num_options = 4 if num_calls < 5 else 2
    calls = tuple(CallOptions(name, _options(rng, 2, rng.randrange(1, num_options), 2)) for name in names)
    precedences = [
        Precedence(before, after, rng.randrange(3))
        for i, before in enumerate(names)
        for after in names[i + 1 :]
        if rng.random() < 0.2 + 0.06 * num_calls
    ]
    roles: list[list[str]] = [[] for _ in range(rng.randrange(1, min(4, num_calls // 2) + 1))]
    for name in names:
        roles[rng.randrange(len(roles))].append(name)
    copies = tuple((role[-1], *role[:-1]) for role in roles if len(role) > 1)
    moves = []
    for source, target, *_ in copies:
        ticks = {(a, b, n): rng.randrange(5) for a in "PQ" for b in "PQ" for n in range(3) if (a, n) != (b, 0)}
        moves.append(Transfer(name=f"to {target}", source=source, target=target, occupies="both", ticks=ticks))
        precedences.append(Precedence(f"to {target}", target))
    problem = Problem(
        num_ranks=2,
        device_units=rng.choice((16, 24, 40, 100)),
        calls=calls,
        tasks=(*(CallRun(name=name, call=name) for name in names), *moves),
        precedences=tuple(precedences),
        sharing_groups=copies,
    )
    return _streamed(rng, problem) if rng.random() < 0.5 else problem


def _streamed(rng: random.Random, problem: Problem) -> Problem:
    """The problem with some of the waits between runs streamed, and options that may start early."""
    runs = {call.name for call in problem.calls}
    calls = tuple(
        CallOptions(call.name, tuple(replace(o, early_ticks=rng.randrange(o.ticks + 1)) for o in call.options))
        for call in problem.calls
    )
    precedences = tuple(
        p._replace(streamed=p.before in runs and p.after in runs and rng.random() < 0.6) for p in problem.precedences
    )
    return replace(problem, calls=calls, precedences=precedences)


def with_carried(seed: int, problem: Problem) -> Problem:
    """The problem with some hand-overs to later turns, and options that hand over late."""
    rng = random.Random(seed)
    runs = [call.name for call in problem.calls]
    calls = tuple(
        CallOptions(
            call.name, tuple(replace(o, late_ticks=rng.choice((0, 0, rng.randrange(15)))) for o in call.options)
        )
        for call in problem.calls
    )
    precedences = tuple(p._replace(late=p.before in runs and rng.random() < 0.3) for p in problem.precedences)
    carried = tuple(
        CarriedPrecedence(*rng.sample(runs, 2), rng.choice((1, 1, 2)), rng.randrange(-2, 20), rng.random() < 0.5)
        for _ in range(rng.randrange(1, 4))
    )
    return replace(problem, calls=calls, precedences=precedences, carried=carried)


def _options(rng: random.Random, num_ranks: int, num_options: int, step: int) -> tuple[Option, ...]:
    """All positions of a few random sizes, so that ranks are interchangeable as in a real cluster."""
    sizes = [2**k for k in range(step.bit_length()) if 2**k < step] + [*range(step, num_ranks + 1, step)]
    found = []
    while len(found) < num_options:
        size, layout, shared = rng.choice(sizes), rng.choice("PQ"), rng.randrange(4)
        ticks, resident, transient = rng.randrange(1, 12), rng.randrange(6), rng.randrange(6)
        every = range(0, num_ranks - size + 1, min(size, step))
        firsts = every if rng.random() < 0.6 else [rng.choice(every)]
        for first in firsts:
            place = Place(first, size, layout)
            known = next((o.shared_units for o in found if o.place == place), shared)
            found.append(
                Option(
                    place=place,
                    ticks=ticks,
                    resident_units=resident + known,
                    shared_units=known,
                    transient_units=transient,
                )
            )
    return tuple(found)
