"""How well a law could do at all on the multi-node training rows, whatever its constants.

    python -m benchmarks.fidelity.ceiling --data DIR

The laws that are allowed: an iteration of m micro-batches in p pipeline stages of L/p layers each takes

    (m + p - 1) (L/p layer + slot) + update

where `layer` and `slot` may be any times that model, tp and micro-batch size decide, as long as neither falls when
micro-batches grow nor rises for each of their sequences; and `update` any time that model, tp x pp and dp decide. A
linear program chooses all of them to minimise the mean relative error. Printed are that minimum, below which no such
law comes, and the rank correlation and the regret that these times reach, below which the best of them do not stay.

Then the rows themselves are scored as if they had been measured a second time. Two teams that measured one setting
differ by 6 %, as the notes of the data say, so both times are taken to scatter about the published one, log-normally
and each row for itself, until they differ by that on average. What a second measurement does not reach, no prediction
can be held to.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

from ortools.linear_solver import pywraplp

from benchmarks.fidelity.rows import Row, read_rows, row_files
from benchmarks.fidelity.score import Answer, Bar, Score
from benchmarks.fidelity.sets import SETS
from benchmarks.fidelity.training import question
from meshwright.profiles.errors import BadInput

_SET = "vTrain multi-node"
_TEAMS_DIFFER = 0.06
_NUM_DRAWS = 1000


class Iteration(NamedTuple):
    """What decides an iteration, and the seconds that were measured."""

    model: str
    num_layers: int
    tp: int
    pp: int
    dp: int
    micro_batch_size: int
    num_batches: int
    measured: float

    @property
    def num_slots(self) -> int:
        return self.num_batches + self.pp - 1


def main() -> int:
    """The exit code: 0, or 2 for a folder that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity.ceiling", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    known = next(known for known in SETS if known.name == _SET)
    try:
        files = row_files(parser.parse_args().data)
        rows = [row for stem in known.files if stem in files for row in read_rows(files[stem]) if known.where(row)]
    except BadInput as problem:
        print(f"error: {problem}", file=sys.stderr)
        return problem.exit_code
    iterations = [_iteration(row) for row in rows]
    score = ceiling(iterations)
    print(f"{_SET}, {score.used} rows: mean {score.mean:.1%}, Spearman {score.spearman:.3f}, regret {score.regret:.1%}")
    print(f"bars: mean {known.bar.mean:.0%}, Spearman {known.bar.spearman}, regret {known.bar.regret:.0%}")
    for answer in score.worst(5):
        print(
            f"{answer.label}: measured {answer.measured:.2f} s, best law {answer.predicted:.2f} s, {answer.error:+.1%}"
        )
    again = [measured_again(iterations, _TEAMS_DIFFER, seed) for seed in range(_NUM_DRAWS)]
    mean, spearman, regret = (
        statistics.fmean(getattr(score, of) for score in again) for of in ("mean", "spearman", "regret")
    )
    print(f"measured again, on average of {_NUM_DRAWS}: mean {mean:.1%}, Spearman {spearman:.3f}, regret {regret:.1%}")
    return 0


def _iteration(row: Row) -> Iteration:
    asked, _, measured = question(row)
    layout, size = asked.layout, asked.schedule.micro_batch_size
    return Iteration(
        model=f"{asked.model.num_layers}x{asked.model.hidden_size}",
        num_layers=asked.model.num_layers,
        tp=layout.tp,
        pp=layout.pp,
        dp=layout.dp,
        micro_batch_size=size,
        num_batches=asked.batch_size // layout.dp // size,
        measured=measured,
    )


def ceiling(rows: Sequence[Iteration]) -> Score:
    """The score of the law, of those allowed, with the least mean relative error."""
    solver = pywraplp.Solver.CreateSolver("GLOP")
    times: dict[Hashable, Any] = {}

    def time(*key: Hashable) -> Any:
        if key not in times:
            times[key] = solver.NumVar(0, solver.infinity(), "")
        return times[key]

    predicted: list[Any] = []
    for row in rows:
        decides = row.model, row.tp, row.micro_batch_size
        slot = row.num_layers / row.pp * time("layer", *decides) + time("slot", *decides)
        seconds = row.num_slots * slot + time("update", row.model, row.tp * row.pp, row.dp)
        error = time("error", len(predicted))
        solver.Add(error >= seconds / row.measured - 1)
        solver.Add(error >= 1 - seconds / row.measured)
        predicted.append(seconds)
    sizes = {(row.model, row.tp, row.micro_batch_size) for row in rows}
    for (model, tp, small), (other, other_tp, large) in permutations(sizes, 2):
        if (model, tp) == (other, other_tp) and small < large:
            for kind in ("layer", "slot"):
                less, more = time(kind, model, tp, small), time(kind, model, tp, large)
                solver.Add(more >= less)
                solver.Add(more / large <= less / small)
    solver.Minimize(sum(time("error", index) for index in range(len(rows))))
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        raise BadInput("the linear program of the rows has no optimum; look for rows without seconds.")
    return _score([_answer(row, seconds.solution_value()) for row, seconds in zip(rows, predicted, strict=True)])


def measured_again(rows: Sequence[Iteration], apart: float, seed: int) -> Score:
    """One measurement of the rows scored as the prediction of another, from which it differs by `apart` on average."""
    draw = random.Random(seed)
    sigma = apart / 2 * math.sqrt(math.pi)  # the mean of |x - y| of two normal numbers is 2 sigma / sqrt(pi)

    def measured(row: Iteration) -> float:
        return row.measured * draw.lognormvariate(0.0, sigma)

    return _score([_answer(row._replace(measured=measured(row)), measured(row)) for row in rows])


def _answer(row: Iteration, predicted: float) -> Answer:
    return Answer(
        label=f"{row.model} tp{row.tp},pp{row.pp},dp{row.dp} mbs{row.micro_batch_size}",
        measured=row.measured,
        predicted=predicted,
        setting=row.model,
    )


def _score(answers: Sequence[Answer]) -> Score:
    return Score(name=_SET, bar=Bar(), answers=tuple(answers), skipped=Counter())


if __name__ == "__main__":
    sys.exit(main())
