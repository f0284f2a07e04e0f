"""What is kept is beaten by nothing, and what is left out is."""

from __future__ import annotations

import random

from meshwright.planner.solver.pareto import undominated
from tests.seeds import seeds


@seeds(4, all=20)
def test_a_row_stays_exactly_when_no_other_beats_it(seed: int) -> None:
    rng = random.Random(seed)
    rows = [tuple(rng.randrange(5) for _ in range(3)) for _ in range(rng.randrange(60))]
    kept = undominated(rows)
    for index, row in enumerate(rows):
        rivals = [other for other in rows if other != row and all(a <= b for a, b in zip(other, row, strict=True))]
        assert (index in kept) == (not rivals and rows.index(row) == index)


def test_what_is_kept_comes_in_the_order_of_its_amounts() -> None:
    rows = [(3.0, 1.0), (1.0, 3.0), (2.0, 2.0), (1.0, 3.0)]
    assert undominated(rows) == [1, 2, 0]
