"""A run is planned again for the nodes that are left, at the speeds that it has shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.planner.job.job import require_job
from meshwright.planner.plan.plan import write_plan
from meshwright.planner.plan.verify import verify
from meshwright.profiles.errors import BadInput
from meshwright.runtime.execution.replanning import replan_for_nodes
from meshwright.runtime.execution.request import RunRequest
from tests.runtime.cli.test_trace_options import run_with_tokens
from tests.runtime.small_job import request, write_job


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> RunRequest:
    directory = tmp_path_factory.mktemp("job")
    return request(write_job(directory, num_ranks=1, nodes=2), directory / "run", "actor_train.layout=dp2")


def test_the_plan_for_fewer_nodes_is_a_plan_of_the_same_job(asked: RunRequest) -> None:
    found = replan_for_nodes(asked, 1)
    assert verify(found) == ()
    assert found.facts.cluster.num_ranks == 1
    assert found.facts.workload == asked.plan.facts.workload
    assert found.facts.models == asked.plan.facts.models


def test_pins_that_need_the_nodes_that_are_lost_are_let_go(asked: RunRequest) -> None:
    assert asked.plan.pins == ("actor_train.layout=tp1,pp1,dp2",)
    assert replan_for_nodes(asked, 1).pins == ()


def test_nodes_of_several_kinds_are_not_planned_again(asked: RunRequest, tmp_path: Path) -> None:
    mixed = asked.plan.facts.model_copy(update={"cluster": object()})
    with pytest.raises(BadInput, match="of several kinds"):
        replan_for_nodes(replace(asked, plan=asked.plan.model_copy(update={"facts": mixed})), 1)


def test_the_plan_for_fewer_nodes_has_the_lengths_that_the_run_has_met(asked: RunRequest, tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", asked.plan)
    run = run_with_tokens(tmp_path / "plan.json", tmp_path / "run", response=18.0)
    found = replan_for_nodes(replace(asked, out=run), 1)
    assert found.facts.workload.response_lengths.mean == pytest.approx(18.0, rel=0.02)
    require_job(found.facts, asked.job, asked.directory, lengths_are_observed=found.lengths_are_observed)
