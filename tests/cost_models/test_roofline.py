"""No stage is quicker than its arithmetic at the device's peak, and no generation than the least of its rounds."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.lower_bounds import rank_seconds_lower_bound
from meshwright.planner.job.job import Facts, read_job, resolve
from meshwright.planner.plan.cost_queries import cost_model_of, query_for_choice
from meshwright.planner.plan.pool_rules import pool_sizes
from meshwright.planner.plan.steps_ahead import max_deferral, search_cases, steps_ahead_patterns
from meshwright.planner.search.frontiers import frontier
from meshwright.planner.search.legal_choices import legal_choices
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.model_parts.hf_config import SlidingWindow
from meshwright.profiles.stages import GENERATE

EXAMPLES = Path(__file__).parents[2] / "examples"


def facts_of(job: str) -> tuple[Facts, Cluster]:
    path = EXAMPLES / job / "job.yaml"
    facts = resolve(read_job(path), path.parent)
    assert isinstance(facts.cluster, Cluster)
    return facts, facts.cluster


@pytest.mark.parametrize("job", ["7b-16xa100", "long-tail-64"])
def test_no_choice_is_below_the_least(job: str) -> None:
    facts, cluster = facts_of(job)
    small = cluster.model_copy(update={"nodes": 1})
    model = AnalyticModel(small, facts.workload, facts.precision)
    facts = facts.model_copy(update={"cluster": small, "staleness": 0})
    for stage in PPO_GRAPH.stages:
        found = frontier(facts, model, stage, (), is_limited=False, is_plain=True)
        for kind, candidates in found.candidates.items():
            least = model.lower_bound_seconds(stage, facts.models.spec(stage.role), kind.num_ranks, 0)
            assert 0 < least <= min(candidate.seconds for candidate in candidates)


def test_training_is_three_passes_and_every_epoch_is_one_more() -> None:
    facts, cluster = facts_of("7b-16xa100")
    twice = facts.workload.model_copy(update={"num_epochs": 2 * facts.workload.num_epochs})
    spec = facts.models.actor

    def least(stage: str, workload: object = facts.workload) -> float:
        found = next(one for one in PPO_GRAPH.stages if one.name == stage)
        return rank_seconds_lower_bound(found, spec, cluster, workload, facts.precision)  # type: ignore[arg-type]

    assert least("actor_train") == pytest.approx(3 * facts.workload.num_epochs * least("actor_logprob"))
    assert least("actor_train", twice) == pytest.approx(2 * least("actor_train"))
    assert least("actor_generate") > least("actor_logprob")


@pytest.mark.parametrize("job", ["moe-16384", "mixed-32", "70b-64xh100", "agents-397b-256"])
def test_no_generation_is_below_what_it_is_told_to_take_at_least(job: str) -> None:
    """Random choices, quick and slow: with slots for all and for few, in turn and running on."""
    path, draw, told = EXAMPLES / job / "job.yaml", random.Random(0), []
    facts = resolve(read_job(path), path.parent)
    model, stage = cost_model_of(facts), facts.graph.by_name[GENERATE]
    every = [
        scope
        for ahead in steps_ahead_patterns(facts.graph, facts.staleness)
        for scope in search_cases(ahead, facts.staleness)
    ]
    while len(told) < 40:
        part, scope = draw.randrange(len(facts.cluster.parts)), draw.choice(every)
        size = draw.choice([size for size in pool_sizes(facts.cluster) if size <= 1024])
        legal = (
            list(legal_choices(facts, stage, size, (), search_case=scope))
            if size <= facts.cluster.parts[part].num_ranks
            else []
        )
        for choice in draw.sample(legal, min(4, len(legal))):
            deferral = max_deferral(scope.ahead, facts.staleness)
            query = query_for_choice(facts, stage, choice, deferral=deferral, part=part)
            least, seconds = model.generation_lower_bound(query), model.seconds(query).total
            assert least <= seconds * (1 + 1e-9), choice
            told.append(least / seconds)
    assert max(told) > 0.5


def test_what_layers_with_a_sliding_window_read_is_left_out_of_the_least() -> None:
    facts, cluster = facts_of("long-tail-64")
    generate, spec = PPO_GRAPH.stages[0], facts.models.actor
    windows = (SlidingWindow(num_tokens=128, every=2), SlidingWindow(num_tokens=128))
    whole, half, none = (
        rank_seconds_lower_bound(generate, replace(spec, window=window), cluster, facts.workload, facts.precision)
        for window in (None, *windows)
    )
    assert whole > half > none > 0
    assert whole - half == pytest.approx(half - none)
