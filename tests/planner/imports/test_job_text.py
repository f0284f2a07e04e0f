"""The job of a configuration is one, and names models that are here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.planner.imports.job_text import JobSource
from meshwright.planner.imports.readers import READERS
from meshwright.planner.plan.job import read_job, resolve
from meshwright.profiles.errors import BadInput
from tests.planner.imports.written import plan_of, written


def test_the_job_is_read_again_with_what_the_configuration_says(tmp_path: Path) -> None:
    plan = plan_of("verl", 1)
    path = written("verl", plan, tmp_path)
    configured = READERS["verl"].read(path)
    source = JobSource(path=path, trainer="verl", device="h100-sxm")
    (tmp_path / "job.yaml").write_text(source.text(configured, tmp_path))
    job = read_job(tmp_path / "job.yaml")
    assert job == source.job(configured, tmp_path)
    facts = resolve(job, tmp_path)
    assert facts.workload.batch_size == plan.facts.workload.batch_size
    assert facts.staleness == 1
    assert facts.cluster.num_ranks == plan.facts.cluster.num_ranks
    assert job.ppo.gae_lambda == 0.95


def test_a_model_that_is_not_here_is_asked_for(tmp_path: Path) -> None:
    path = written("verl", plan_of("verl", 0), tmp_path)
    configured = READERS["verl"].read(path)
    elsewhere = JobSource(path=tmp_path / "other" / "run.sh", trainer="verl", device="h100-sxm")
    with pytest.raises(BadInput, match=r"the actor model models/actor .* is not here, and nothing is fetched"):
        elsewhere.text(configured, tmp_path)
    shapes = {"": tmp_path / "models/actor"}
    assert replace(elsewhere, shapes=shapes).job(configured, tmp_path).models.actor.path == "models/actor"
    without = replace(configured, said=tuple(one for one in configured.said if one.what != "models.reward"))
    with pytest.raises(BadInput, match=r"has no reward model, and a job has one; .* --model reward=PATH"):
        replace(elsewhere, shapes=shapes).text(without, tmp_path)
