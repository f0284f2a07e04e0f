"""A table answers where it covers the shape, equations elsewhere, and a run's corrections hold for both."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.blended import BlendedModel, cost_model
from meshwright.cost_models.cost import Source
from meshwright.cost_models.protocol import RefitQuery, StageQuery
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.errors import BadInput
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.harness import points, record
from meshwright.profiles.layout import Layout
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import Role
from meshwright.profiles.table import Correction, Table, TimedPass, Traffic, TrafficCorrection, shape_of
from meshwright.profiles.workload import Workload
from tests.cost_models.tables import PROVENANCE, sample


@pytest.mark.parametrize("stage", PPO_GRAPH.stages, ids=lambda stage: stage.name)
@pytest.mark.parametrize("layout", ["tp1", "tp2,pp2,dp2"])
def test_a_stage_that_the_table_covers_computes_as_measured(
    *,
    table: Table,
    shallow: dict[Role, ModelSpec],
    query: Callable[..., StageQuery],
    a100s: Callable[[int], Cluster],
    fixed: Workload,
    layout: str,
    stage: object,
) -> None:
    question = query(stage.name, layout, 4, slots=16, model=shallow[stage.role])
    blended = BlendedModel(table, a100s(1), fixed, "bf16").seconds(question)
    computing = [term for term in blended.terms if term.name.endswith(("layers", "embedding and head", "optimizer"))]
    assert computing
    assert Source.ANALYTIC not in {term.source for term in computing}
    assert blended.total > AnalyticModel(a100s(1), fixed, "bf16").seconds(question).total


def test_a_stage_at_measured_points_is_measured(
    table: Table,
    shallow: dict[Role, ModelSpec],
    query: Callable[..., StageQuery],
    a100s: Callable[[int], Cluster],
    fixed: Workload,
) -> None:
    question = query("ref_logprob", "tp1", 4, model=shallow[Role.REF])
    cost = BlendedModel(table, a100s(1), fixed, "bf16").seconds(question)
    assert cost.source is Source.MEASURED
    assert cost.total == pytest.approx(2 * AnalyticModel(a100s(1), fixed, "bf16").seconds(question).total)


def test_leaving_the_measured_range_is_said(
    table: Table,
    shallow: dict[Role, ModelSpec],
    query: Callable[..., StageQuery],
    a100s: Callable[[int], Cluster],
    fixed: Workload,
) -> None:
    question = query("ref_logprob", "tp1", 512, model=shallow[Role.REF])
    more = fixed.model_copy(update={"batch_size": 512})
    assert BlendedModel(table, a100s(1), more, "bf16").seconds(question).source is Source.EXTRAPOLATED


def test_what_the_table_lacks_is_analytic(
    table: Table, llama: ModelSpec, query: Callable[..., StageQuery], a100s: Callable[[int], Cluster], fixed: Workload
) -> None:
    question = query("ref_logprob", "tp1", 4, model=replace(llama, ffn_size=1024, num_layers=2))
    blended = BlendedModel(table, a100s(1), fixed, "bf16").seconds(question)
    assert blended == AnalyticModel(a100s(1), fixed, "bf16").seconds(question)
    assert {term.source for term in blended.terms} == {Source.ANALYTIC}


def test_measured_collectives_replace_the_ring_within_a_node(
    table: Table,
    shallow: dict[Role, ModelSpec],
    query: Callable[..., StageQuery],
    a100s: Callable[[int], Cluster],
    fixed: Workload,
) -> None:
    def source(layout: str) -> Source:
        cost = BlendedModel(table, a100s(4), fixed, "bf16").seconds(
            query("actor_train", layout, 4, model=shallow[Role.ACTOR])
        )
        return next(term.source for term in cost.terms if term.name == "gradient reduction")

    assert source("dp8") is Source.EXTRAPOLATED  # 1.3 GB of gradients, 16 MiB measured
    assert source("dp16") is Source.ANALYTIC


def test_a_table_of_another_device_or_precision_is_refused(
    table: Table, a100s: Callable[[int], Cluster], fixed: Workload
) -> None:
    other = table.model_copy(update={"provenance": PROVENANCE.model_copy(update={"device": "h200"})})
    with pytest.raises(BadInput, match="the cluster has 'a100-80gb'"):
        cost_model(a100s(1), fixed, "bf16", other)
    with pytest.raises(BadInput, match="the job runs in fp32"):
        cost_model(a100s(1), fixed, "fp32", table)


def test_the_factory_blends_when_there_is_a_table(
    table: Table, a100s: Callable[[int], Cluster], fixed: Workload
) -> None:
    assert isinstance(cost_model(a100s(1), fixed, "bf16", table), BlendedModel)
    assert type(cost_model(a100s(1), fixed, "bf16")) is AnalyticModel


def test_a_long_tail_is_covered_by_the_points_of_its_workload(
    shallow: dict[Role, ModelSpec], query: Callable[..., StageQuery], a100s: Callable[[int], Cluster]
) -> None:
    """The harness chooses the grid: no compute of these stages is extrapolated."""
    workload = Workload(
        batch_size=32, prompt=LengthSpec(max=64, median=20, p99=60), response=LengthSpec(max=256, median=40, p99=250)
    )
    rows = [record(point, sample(1.0 + point.rows)) for point in points(PPO_GRAPH, shallow, workload, a100s(1))]
    model = BlendedModel(Table(provenance=PROVENANCE, measurements=tuple(rows)), a100s(1), workload, "bf16")
    for stage in PPO_GRAPH.stages:
        cost = model.seconds(query(stage.name, "tp1", 8, slots=8, model=shallow[stage.role]))
        extrapolated = {term.name for term in cost.terms if term.source is Source.EXTRAPOLATED}
        assert extrapolated == set(), stage.name


def test_a_correction_multiplies_its_body_of_its_shape_and_is_no_longer_measured(
    table: Table,
    shallow: dict[Role, ModelSpec],
    query: Callable[..., StageQuery],
    a100s: Callable[[int], Cluster],
    fixed: Workload,
) -> None:
    correction = Correction(
        shape=shape_of(shallow[Role.REF], 1),
        timed_pass=TimedPass.FORWARD,
        factor=1.5,
        spread=0.0,
        stages=("ref_logprob",),
        plan="a",
        num_steps=3,
        date="2026-11-21",
    )
    twice = table.model_copy(update={"corrections": (correction, correction)})
    was, now = (BlendedModel(t, a100s(1), fixed, "bf16") for t in (table, twice))
    ref = query("ref_logprob", "tp1", 4, model=shallow[Role.REF])
    assert now.seconds(ref).total == pytest.approx(1.5**2 * was.seconds(ref).total)
    assert now.seconds(ref).source is Source.INTERPOLATED
    for other in ("critic_value", "actor_train", "actor_generate"):
        question = query(other, "tp1", 4, slots=16, model=shallow[PPO_GRAPH.by_name[other].role])
        assert now.seconds(question) == was.seconds(question)


@pytest.mark.parametrize("traffic", list(Traffic))
def test_traffic_takes_its_factor_and_what_a_run_took_beyond_it(
    *,
    table: Table,
    shallow: dict[Role, ModelSpec],
    query: Callable[..., StageQuery],
    a100s: Callable[[int], Cluster],
    fixed: Workload,
    traffic: Traffic,
) -> None:
    slower = TrafficCorrection(traffic=traffic, factor=3.0, seconds=0.5, plan="a", num_steps=3, date="2026-11-21")
    was, now = (
        BlendedModel(t, a100s(4), fixed, "bf16") for t in (table, table.model_copy(update={"traffic": (slower,)}))
    )
    model = shallow[Role.ACTOR]
    asked = {
        Traffic.COLLECTIVE: lambda m: m.seconds(query("actor_train", "dp16", 4, model=model)),
        Traffic.REFIT: lambda m: m.refit_seconds(
            RefitQuery(model=model, source=Layout(tp=2), target=Layout(dp=2), overlap=0)
        ),
        Traffic.TRANSFER: lambda m: m.transfer_seconds(1e9),
    }
    for kind, ask in asked.items():
        if kind is not traffic:
            assert ask(now) == ask(was)
    before, after = (asked[traffic](m) for m in (was, now))
    if traffic is Traffic.COLLECTIVE:
        names = ("gradient reduction", "parameter gather")
        found, known = ([t.amount for t in cost.terms if t.name in names] for cost in (after, before))
        assert found == pytest.approx([3 * seconds + 0.5 for seconds in known])
    else:
        assert after.total == pytest.approx(3 * before.total + 0.5)
        assert (after.terms[-1].amount, after.terms[-1].source) == (0.5, Source.INTERPOLATED)
