"""Tables of operators that others have measured."""

from __future__ import annotations

import pytest

from meshwright import api
from meshwright.planner.job.sections import ClusterSpec
from meshwright.profiles.aiconfigurator import PACKAGE, package_version
from tests.planner.jobs import small_facts

needs_package = pytest.mark.skipif(package_version() is None, reason=f"{PACKAGE} is not installed")


def test_a_device_or_a_job_is_named() -> None:
    with pytest.raises(api.BadInput, match="name a job, or a device"):
        api.import_operators()


def test_a_device_that_nobody_measured_is_refused() -> None:
    with pytest.raises(api.BadInput, match=f"{PACKAGE} has no operators of the job's device 'toy'"):
        api.import_operators(small_facts())


@needs_package
def test_a_table_of_a_jobs_shapes_plans_it() -> None:
    facts = small_facts().model_copy(update={"cluster": ClusterSpec(device="h100-sxm", ranks_per_node=2).resolve()})
    table = api.import_operators(facts)
    assert table.provenance.device == "h100-sxm"
    found = api.plan(facts, table, limits=api.Limits(gap=0.5))
    assert isinstance(found, api.Plan)
    assert "profile" in found.digests
    with pytest.raises(api.BadInput, match="the job's cluster has 'h100-sxm'"):
        api.import_operators(facts, device="h200_sxm")
