"""Published models of every family are planned, and their plans verify."""

from __future__ import annotations

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Facts, RoleModels
from meshwright.planner.job.rewards_and_tools import RewardLoad
from meshwright.planner.job.sections import ClusterSpec
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.verify import verify
from meshwright.profiles.documents import canonical_json, parse
from meshwright.profiles.environment.latency import LatencySpec
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec, model_from_config
from meshwright.profiles.workload import Workload
from tests.profiles.model_parts.published import PUBLISHED

WORKLOAD = Workload(
    batch_size=256,
    group_size=16,
    prompt=LengthSpec(max=512, fixed=512),
    response=LengthSpec(max=2048, median=900, p99=2000),
    num_minibatches=1,
)
REWARD = RewardLoad(name="maths", is_remote=False, batch_size=1, latency_seconds=LatencySpec(fixed=0.01))
BYTES_PER_PARAMETER = 40
"""Memory of a cluster per parameter of the actor: optimizer state, a reference, copies for generation, activations."""


def facts_of(model: ModelSpec) -> Facts:
    needed = BYTES_PER_PARAMETER * model.num_params / 80e9 / 8
    nodes = 1 << max(0, (int(needed)).bit_length())
    cluster = ClusterSpec(device="h100-sxm", nodes=nodes, ranks_per_node=8, network="ib-ndr-400").resolve()
    return Facts(
        algorithm="grpo",
        models=RoleModels(actor=model, ref=model),
        cluster=cluster,
        workload=WORKLOAD,
        precision="bf16",
        rewards=(REWARD,),
    )


def planned(model: ModelSpec) -> Plan:
    facts = facts_of(model)
    plan = compile_plan(facts, AnalyticModel(facts.cluster, facts.workload, facts.precision))
    assert isinstance(plan, Plan)
    assert verify(plan) == ()
    assert parse(Plan, canonical_json(plan), "plan") == plan
    return plan


def test_interleaved_pipelines_of_layers_that_differ_are_planned() -> None:
    """Chunks of a layer or of two have other parameters on a rank; this used to end the search with an error."""
    config = PUBLISHED["qwen3.5-9b-text"] | {"num_hidden_layers": 16}
    planned(model_from_config(config, name="few layers"))


@pytest.mark.check_all
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_model_is_planned(name: str) -> None:
    planned(model_from_config(PUBLISHED[name], name=name))
