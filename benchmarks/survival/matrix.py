"""Every plan's run resumed under every plan: what is learned then is what one rank learns that is resumed likewise.

A plan that works ahead learns from staler tokens than a synchronous one, so a pair is held against a run on one rank
which goes over from the kind of the first plan to the kind of the second behind the same step.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.survival.job import Case, request_of, write_models
from benchmarks.survival.kills import APART
from meshwright.profiles.errors import MeshwrightError
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.train import run_plan

STEPS, SAVED = 4, 2
TOLERANCE = 1e-4

_OF_TIME = {"seconds", "tokens_per_second", "overhead"}

_case = partial(Case, longest_prompt=4086)
"""A job whose sequences may have 4,096 tokens, so that two ranks may have a part of each."""
PLAIN = ("actor_generate.batches_in_flight=1", "actor_generate.overcommit=0")
REFERENCES = (
    _case(name="1 rank", num_ranks=1),
    _case(name="1 rank, a step ahead", num_ranks=1, pins=PLAIN, staleness=1, ahead=1),
)
PLANS = (
    REFERENCES[0],
    _case(
        name="tp2, generated in pp2, critic cp2",
        num_ranks=2,
        pins=("actor_train.layout=tp2,sp", "actor_generate.layout=pp2", "critic_train.layout=cp2"),
    ),
    _case(name="dp2,ep2", num_ranks=2, pins=("actor_train.layout=dp2,ep2", "critic_train.layout=pp2")),
    _case(name="vpp2 and tp2", num_ranks=2, pins=("actor_train.layout=pp2,vpp2", "actor_generate.layout=tp2")),
    _case(name="4 ranks, ep2", num_ranks=4, pins=("actor_train.layout=tp2,dp2,ep2,sp", "critic_train.layout=pp4")),
    _case(name="4 ranks, pp2,dp2", num_ranks=4, pins=("actor_train.layout=pp2,dp2", "critic_train.layout=tp2,dp2")),
    REFERENCES[1],
    _case(name="two pools, a step ahead", num_ranks=2, pins=(*APART, *PLAIN), staleness=1, ahead=1),
)


class Pair(NamedTuple):
    """How far two plans' metrics are apart at most from those of one rank; infinite where the run failed."""

    first: str
    then: str
    apart: float
    said: str = ""

    @property
    def holds(self) -> bool:
        """Whether they learn the same."""
        return self.apart <= TOLERANCE


def measure(scratch: Path) -> list[Pair]:
    """All pairs."""
    write_models(scratch, has_experts=True)
    saved = {case.name: _saved(scratch, case) for case in PLANS}
    kinds = {(a.ahead, b.ahead): _resumed(saved[a.name], b, "reference") for a, b in product(REFERENCES, repeat=2)}
    found = []
    for first, then in product(PLANS, repeat=2):
        try:
            lines = _resumed(saved[first.name], then, "pair")
            pair = Pair(first.name, then.name, _apart(lines, kinds[first.ahead, then.ahead]))
        except MeshwrightError as error:
            pair = Pair(first.name, then.name, math.inf, str(error))
        print(pair, flush=True)
        found.append(pair)
    return found


def report(found: list[Pair]) -> str:
    """As a table of Markdown: a row for each plan that saved, a column for each that went on."""
    by_names = {(pair.first, pair.then): pair for pair in found}
    names = [case.name for case in PLANS]
    rows = [
        f"| {first} | " + " | ".join(f"{by_names[first, then].apart:.0e}" for then in names) + " |" for first in names
    ]
    head = (f"| saved by, resumed by | {' | '.join(names)} |", "|" + "---|" * (len(names) + 1))
    held = sum(pair.holds for pair in found)
    return "\n".join((f"{held} of {len(found)} pairs within {TOLERANCE:.0e}.", "", *head, *rows))


def _saved(scratch: Path, case: Case) -> RunRequest:
    """A run that has come to its checkpoint."""
    asked = request_of(scratch, case, scratch / case.name, SAVED + 1)
    run_plan(replace(asked, checkpoint_every=1, keep=STEPS, checkpoint_minutes=0.0))
    shutil.rmtree(asked.out / "checkpoints" / f"step-{SAVED + 1:06d}")
    return asked


def _resumed(run: RunRequest, case: Case, name: str) -> list[dict[str, Any]]:
    out = run.out.with_name(name)
    shutil.copytree(run.out, out)
    try:
        run_plan(replace(request_of(run.directory, case, out, STEPS), resume=True))
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    finally:
        shutil.rmtree(out)


def _apart(lines: list[dict[str, Any]], known: list[dict[str, Any]]) -> float:
    """The largest difference of any loss, score, norm or other metric that is told in every step and no clock moves."""
    names = set[str].intersection(*(set(line) for line in (*lines, *known))) - _OF_TIME
    return max(abs(line[name] - other[name]) for line, other in zip(lines, known, strict=True) for name in names)
