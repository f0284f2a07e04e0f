"""No mode of an answer in time is dropped."""

from __future__ import annotations

from benchmarks.search.brute_force import best_makespan
from meshwright.planner.solver.fixed_ranks_search import reduced
from meshwright.planner.solver.greedy_schedule import Greedy, Neighbours, Picks
from meshwright.planner.solver.problem import Problem
from tests.planner.problems import only, random_problem
from tests.seeds import seeds


def asked(seed: int) -> Problem:
    return random_problem(seed, num_ranks=4, num_tasks=4, num_modes=3)


@seeds(4, all=16)
def test_the_best_answer_stays_when_its_makespan_is_asked_and_none_when_less_is(seed: int) -> None:
    problem, best = asked(seed), best_makespan(asked(seed))
    if best is None:
        return
    left = reduced(problem, best, lambda _greedy, _picks, _near: best)
    assert not left.is_empty
    assert best_makespan(left.problem) == best
    assert left.bound <= best
    none = left.within(best - 1)
    assert none.is_empty or (best_makespan(none.problem) or best) >= best


@seeds(4, all=16)
def test_what_is_suggested_is_a_choice_and_the_first_comes_with_what_is_near_it(seed: int) -> None:
    problem = asked(seed)
    told: list[tuple[Picks, Neighbours | None]] = []

    def suggest(greedy: Greedy, picks: Picks, near: Neighbours | None) -> int:
        told.append((picks, near))
        assert greedy.score(picks).makespan >= 0
        return problem.horizon

    reduced(problem, problem.horizon, suggest)
    for number, (picks, near) in enumerate(told):
        assert only(problem, picks).tasks
        assert (near is not None) == (number == 0)
        assert near is None or all(pick in modes for pick, modes in zip(picks, near, strict=True))


def test_nothing_within_less_than_the_shortest_is_said_with_its_bound() -> None:
    problem = asked(3)
    left = reduced(problem, 0, lambda _greedy, _picks, _near: 0)
    assert left.is_empty
    assert left.bound == 1
