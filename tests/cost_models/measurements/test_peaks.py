"""Measured working memory takes the place of counted activations and logits, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.blended import BlendedModel
from meshwright.cost_models.cost import Source, Term
from meshwright.cost_models.measured import MEASURED
from meshwright.cost_models.protocol import StageQuery
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.harness import failed_measurement, points, record
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import Role
from meshwright.profiles.table import Table, TimedPass
from meshwright.profiles.workload import Workload
from tests.cost_models.tables import PROVENANCE, sample

LAYER, ENDS = 1_000_000, 200_000
"""Bytes per token in training. A forward pass keeps no layer."""


@pytest.fixture
def specs(llama: ModelSpec) -> dict[Role, ModelSpec]:
    return {role: replace(llama, num_layers=8, scalar_head=role in ("critic", "reward")) for role in Role}


@pytest.fixture
def table(specs: dict[Role, ModelSpec], fixed: Workload, a100s: Callable[[int], Cluster]) -> Table:
    rows = []
    for point in points(PPO_GRAPH, specs, fixed, a100s(1)):
        layers = point.num_layers * LAYER if point.timed_pass is TimedPass.TRAIN else 0
        rows.append(record(point, sample(1.0), point.rows * point.tokens * (layers + ENDS)))
    return Table(provenance=PROVENANCE, measurements=tuple(rows))


@pytest.mark.parametrize(
    ("stage", "layout", "num_layers"),
    [
        ("actor_train", "tp1", 8),
        ("actor_train", "tp2,pp2,dp2", 8),
        ("critic_train", "tp1,pp4", 8),
        ("ref_logprob", "tp2", 0),
    ],
)
def test_activations_and_logits_are_as_measured(
    *,
    table: Table,
    specs: dict[Role, ModelSpec],
    query: Callable[..., StageQuery],
    a100s: Callable[[int], Cluster],
    fixed: Workload,
    stage: str,
    layout: str,
    num_layers: int,
) -> None:
    """4 rows of 128 tokens; the first of p pipeline stages holds p micro-batches of its 8/p layers."""
    question = query(stage, layout, 4, model=specs[Role.ACTOR])
    question = replace(question, model=specs[question.stage.role])
    counted = AnalyticModel(a100s(1), fixed, "bf16").memory(question)
    found = BlendedModel(table, a100s(1), fixed, "bf16").memory(question)
    assert found.resident == counted.resident
    assert found.transient.terms[-1] == Term(
        MEASURED, pytest.approx(4 * 128 * (num_layers * LAYER + ENDS)), Source.MEASURED
    )
    assert not {"activations", "working set", "logits"} & {term.name for term in found.transient.terms}


@pytest.mark.parametrize(
    "settings", [{"stage": "actor_generate", "slots": 16}, {"stage": "actor_train", "recompute": "full"}]
)
def test_what_no_body_runs_is_counted(
    *,
    table: Table,
    specs: dict[Role, ModelSpec],
    query: Callable[..., StageQuery],
    a100s: Callable[[int], Cluster],
    fixed: Workload,
    settings: dict[str, object],
) -> None:
    question = query(layout="tp1", mbs=4, model=specs[Role.ACTOR], **settings)
    counted = AnalyticModel(a100s(1), fixed, "bf16").memory(question)
    assert BlendedModel(table, a100s(1), fixed, "bf16").memory(question) == counted


def test_a_table_without_peaks_or_with_failures_only_counts(
    *,
    table: Table,
    specs: dict[Role, ModelSpec],
    query: Callable[..., StageQuery],
    a100s: Callable[[int], Cluster],
    fixed: Workload,
) -> None:
    question = query("actor_train", "tp1", 4, model=specs[Role.ACTOR])
    counted = AnalyticModel(a100s(1), fixed, "bf16").memory(question)
    silent = [measured.model_copy(update={"peak_bytes": None}) for measured in table.measurements]
    failed = [failed_measurement(measured.point, "out of memory") for measured in table.measurements]
    for measurements in (silent, failed):
        other = Table(provenance=PROVENANCE, measurements=tuple(measurements))
        assert BlendedModel(other, a100s(1), fixed, "bf16").memory(question) == counted
