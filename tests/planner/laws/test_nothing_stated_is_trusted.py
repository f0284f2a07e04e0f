"""Whoever changes one thing in a plan is told so, unless nothing depends on it: every number is computed again."""

from __future__ import annotations

import functools
import json
import random
import re
from pathlib import Path
from typing import get_args

import pytest

from meshwright.cost_models.protocol import CostModel
from meshwright.planner.analysis.recorded_costs import mismatched_costs
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan, read_plan
from meshwright.planner.plan.steps_ahead import steps_ahead_patterns
from meshwright.planner.plan.verify import verify
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.documents import canonical_json
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import EngineName
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.stages import Role
from tests.planner.jobs import mixed_facts, mixture_facts, small_facts
from tests.planner.mutations import mutate
from tests.planner.plans import long_facts, random_plan

NUM_MUTATIONS = 2000

FREE = {
    r"digests\.job": "of a file that the plan does not hold",
    r"solver\.(name|version|seed|num_workers|max_deterministic_time)": "what it says of itself",
    r"solver\.(status|requested_gap)": "what was asked for, where gap and bound allow it",
    r"solver\.work(\..+)?": "what the search took",
    r"facts\.staleness": "the job's bound, where the plan keeps it",
    r"facts\.controllers": "what may follow the run, which is not planned",
    r"facts\.cache_after_refit": "no sequence may be in flight when the weights change",
    r"pins\.\d+": "what was asked for, where the plan keeps it",
}
"""What may be changed, within what can be read, because nothing in the plan depends on it, and why."""

NAMES = (
    *PPO_GRAPH.by_name,
    *Role,
    *get_args(EngineName),
    *("weights", "compute", "analytic", "measured", "optimal", "feasible", "pinned", "none", "full", "optimizer"),
    *("ranks 0-3", "ranks 0-1", "tokens", "values", "bf16", "fp32", "keep", "recompute", "nobody"),
    "actor_train.recompute=full",
)
"""Legal and illegal ones, of all kinds."""


class Models:
    """The cost model of every facts that were met, each made once."""

    def __init__(self) -> None:
        self._known: dict[str, CostModel] = {}

    def of(self, facts: Facts) -> CostModel:
        key = canonical_json(facts)
        if key not in self._known:
            self._known[key] = cost_model_of(facts)
        return self._known[key]


MODELS = Models()


@functools.cache
def plans() -> tuple[Plan, ...]:
    """Of several jobs: with stages ahead, sequences that run on, chunks, offload, experts, pins, two kinds of nodes."""
    tail = long_facts().workload.model_copy(update={"response": LengthSpec(max=400, median=30, p99=350)})
    jobs = [small_facts(memory_bytes=2**50), long_facts().model_copy(update={"workload": tail})]
    jobs.append(mixture_facts(jobs[0]))
    made = [
        random_plan(seed, facts, MODELS.of(facts), ahead, deferral)
        for facts in jobs
        for ahead in steps_ahead_patterns(PPO_GRAPH, 2)
        for deferral in (0, 2)
        for seed in range(2)
    ]
    for facts, pins in ((small_facts(), ("actor_train.recompute=full",)), (mixed_facts(), ())):
        found = compile_plan(facts, MODELS.of(facts), pins=pins, digests={"job": "0" * 64})
        assert isinstance(found, Plan)
        made.append(found)
    return tuple(made)


def sentences(plan: Plan) -> tuple[str, ...]:
    """What is wrong with a plan."""
    return verify(plan) or mismatched_costs(plan, MODELS.of(plan.facts))


@pytest.mark.slow
def test_the_plans_themselves_are_right() -> None:
    for plan in plans():
        assert sentences(plan) == ()


@pytest.mark.check_all
def test_every_change_of_a_plan_is_told_unless_nothing_depends_on_it(tmp_path: Path) -> None:
    draw, path, accepted = random.Random(0), tmp_path / "plan.json", []
    documents = [(plan, json.loads(canonical_json(plan))) for plan in plans()]
    for _ in range(NUM_MUTATIONS):
        plan, document = draw.choice(documents)
        mutation = mutate(draw, document, NAMES)
        path.write_text(json.dumps(mutation.document))
        try:
            changed = read_plan(path)
        except BadInput as error:
            found: tuple[str, ...] = (str(error),)
        else:
            is_same = changed == plan  # what is not written has its default
            found = ("the same.",) if is_same else sentences(changed)
        assert all(sentence.endswith((".", "?")) and "\n" not in sentence for sentence in found), (str(mutation), found)
        if not found and not any(re.fullmatch(free, ".".join(map(str, mutation.path))) for free in FREE):
            accepted.append(str(mutation))
    assert "\n".join(accepted) == ""


@pytest.mark.parametrize("free", FREE)
def test_what_is_free_is_in_a_plan(free: str) -> None:
    """A list of exceptions that nothing meets would say nothing."""
    keys = {*(f"digests.{name}" for name in ("job",)), *(f"facts.{name}" for name in Facts.model_fields), "pins.0"}
    keys |= {f"solver.{name}" for name in type(plans()[0].solver).model_fields}
    assert any(re.fullmatch(free, key) for key in keys)
