"""No stage is quicker than its arithmetic at the device's peak."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.roofline import least_rank_seconds
from meshwright.planner.plan.job import Facts, read_job, resolve
from meshwright.planner.search.frontier import frontier
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.cluster import Cluster

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
            least = model.least_seconds(stage, facts.models.spec(stage.role), kind.num_ranks, 0)
            assert 0 < least <= min(candidate.seconds for candidate in candidates)


def test_training_is_three_passes_and_every_epoch_is_one_more() -> None:
    facts, cluster = facts_of("7b-16xa100")
    twice = facts.workload.model_copy(update={"num_epochs": 2 * facts.workload.num_epochs})
    spec = facts.models.actor

    def least(stage: str, workload: object = facts.workload) -> float:
        found = next(one for one in PPO_GRAPH.stages if one.name == stage)
        return least_rank_seconds(found, spec, cluster, workload, facts.precision)  # type: ignore[arg-type]

    assert least("actor_train") == pytest.approx(3 * facts.workload.num_epochs * least("actor_logprob"))
    assert least("actor_train", twice) == pytest.approx(2 * least("actor_train"))
    assert least("actor_generate") > least("actor_logprob")
