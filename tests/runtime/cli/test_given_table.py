"""The cost model of a command is the table's where one is given, and analytic where none is."""

from __future__ import annotations

from pathlib import Path

from meshwright.cost_models.cost import Source
from meshwright.cost_models.protocol import StageQuery
from meshwright.planner.job.job import read_job, resolve
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule
from meshwright.runtime.api.arguments import cost_model_builder
from meshwright.runtime.cli.call import read_profile
from tests.runtime.measured import measured_table


def test_without_an_option_there_is_no_table() -> None:
    assert read_profile(None) is None


def test_costs_come_from_the_table_where_there_is_one(job: Path, tmp_path: Path) -> None:
    facts = resolve(read_job(job), job.parent)
    call = StageQuery(
        stage=PPO_GRAPH.by_name["ref_logprob"],
        model=facts.models.ref,
        layout=Layout(dp=2),
        schedule=Schedule(micro_batch_size=4),
    )
    table = read_profile(measured_table(job, tmp_path / "table.json"))
    assert cost_model_builder(table)(facts).seconds(call).source in (Source.MEASURED, Source.INTERPOLATED)
    assert cost_model_builder(None)(facts).seconds(call).source is Source.ANALYTIC
