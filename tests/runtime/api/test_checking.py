"""A plan is checked by its laws and by the model that it was made with, which a measured table may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright import api
from meshwright.planner.proof.prover import prove
from meshwright.profiles.table import Traffic, TrafficCorrection
from meshwright.runtime.api.arguments import cost_model_builder
from tests.runtime.measured import measured_table


@pytest.fixture(scope="module")
def table(job: Path, tmp_path_factory: pytest.TempPathFactory) -> api.Table:
    """As measured, and then corrected by a run."""
    found = api.read_table(measured_table(job, tmp_path_factory.mktemp("table") / "table.json"))
    correction = TrafficCorrection(
        traffic=Traffic.TRANSFER, factor=2.0, seconds=0.5, plan="0" * 64, num_steps=3, date="2026-11-21"
    )
    return found.model_copy(update={"traffic": (correction,)})


@pytest.fixture(scope="module")
def measured(job: Path, table: api.Table) -> api.Plan:
    found = api.plan(api.resolve(api.read_job(job), job.parent), table, limits=api.Limits(gap=0.5))
    assert isinstance(found, api.Plan)
    return found


def cheaper(plan: api.Plan) -> api.Plan:
    """The plan with a term of an edge halved."""
    edge = plan.edges[0]
    return plan.model_copy(update={"edges": (edge.model_copy(update={"cost": edge.cost.scaled(0.5)}), *plan.edges[1:])})


def test_a_plan_of_a_table_is_right_by_that_table_alone(measured: api.Plan, table: api.Table) -> None:
    assert api.verify(measured, table) == ()
    assert any("the cost model computes" in sentence for sentence in api.verify(cheaper(measured), table))
    other = table.model_copy(update={"measurements": table.measurements[1:]})
    (sentence,) = api.verify(measured, other)
    assert sentence.startswith("the plan was made with another table")


def test_without_the_table_laws_alone_are_checked(measured: api.Plan) -> None:
    assert api.verify(cheaper(measured)) == ()
    assert api.verify(measured.model_copy(update={"period_seconds": 1e6}))


def test_who_hides_the_table_is_told_of_every_cost(measured: api.Plan) -> None:
    digests = {name: digest for name, digest in measured.digests.items() if name != "profile"}
    assert api.verify(measured.model_copy(update={"digests": digests}))


def test_a_plan_is_proven_with_the_table_that_it_was_made_with(measured: api.Plan, table: api.Table) -> None:
    with pytest.raises(api.BadInput, match="give the table as --profile"):
        api.prove(measured)
    wrong = measured.model_copy(update={"period_seconds": 1e6})
    with pytest.raises(api.BadInput, match=r"^plan: "):
        api.prove(wrong, table)


def test_a_proof_needs_the_table_of_its_plan(measured: api.Plan, table: api.Table) -> None:
    proof = prove(measured, cost_model_builder(table)(measured.facts), max_splits=0)
    assert api.verify(measured, table, proof) == ()
    assert api.verify(measured, proof=proof) == (
        "the proof is for costs from a measured table; give the table as --profile.",
    )
    (sentence,) = api.verify(measured, table, proof.model_copy(update={"profile": None}))
    assert sentence == "the proof uses another measured table than the plan's; prove this plan again."


def test_of_a_plan_at_the_paces_of_a_run_no_bound_is_proven(measured: api.Plan, table: api.Table) -> None:
    slower = tuple(placement.model_copy(update={"pace": 2.0}) for placement in measured.placements)
    with pytest.raises(api.BadInput, match="a run measured the paces of its stages"):
        api.prove(measured.model_copy(update={"placements": slower}), table)


def test_one_stage_at_the_pace_of_a_run_is_enough_for_no_bound_to_be_proven(small_plan: api.Plan) -> None:
    first, *others = small_plan.placements
    placements = (first.model_copy(update={"pace": 2.0}), *others)
    with pytest.raises(api.BadInput, match="a run measured the paces of its stages"):
        api.prove(small_plan.model_copy(update={"placements": placements}))
