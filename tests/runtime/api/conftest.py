from __future__ import annotations

import pytest

from meshwright import api
from meshwright.cost_models.blended import cost_model
from tests.planner.jobs import small_facts
from tests.planner.plans import random_plan


@pytest.fixture(scope="session")
def small_plan() -> api.Plan:
    """Any legal plan on two ranks, made without a search."""
    facts = small_facts(ranks_per_node=2, batch_size=4, memory_bytes=2**34)
    return random_plan(1, facts, cost_model(facts.cluster, facts.workload, facts.precision))
