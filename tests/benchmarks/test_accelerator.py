"""The accelerator benchmark: its limits are the device's, and its bodies are measured on whole models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.accelerator.jobs import write_job
from benchmarks.accelerator.limits import decode_seconds, train_seconds
from benchmarks.accelerator.shards import MODELS, against
from benchmarks.accelerator.shards import write_job as write_job_of_shards
from benchmarks.accelerator.shares import shares
from meshwright.cost_models.measurements.imported import imported_points, imported_table
from meshwright.planner.plan.job import read_job, resolve
from meshwright.profiles.aiconfigurator import read_operators
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.cluster import Cluster, of_one_kind
from meshwright.profiles.devices import device_named
from meshwright.profiles.stages import Role
from meshwright.profiles.table import Point
from tests.planner.jobs import model_spec

H200, _, _ = device_named("h200")
SPEC = model_spec("actor")


def test_a_decode_step_cannot_be_faster_than_its_weights_and_cache_are_read() -> None:
    untied, tied = (replace(SPEC, tied_embeddings=tied) for tied in (False, True))
    weights = 2 * (SPEC.num_params - SPEC.embedding_params) / H200.memory_bytes_per_second
    assert decode_seconds(untied, H200, "bf16", rows=0, context=100) == pytest.approx(weights)
    assert decode_seconds(tied, H200, "bf16", rows=0, context=100) == pytest.approx(weights)
    one, eight = (decode_seconds(SPEC, H200, "bf16", rows=rows, context=100) - weights for rows in (1, 8))
    assert one == pytest.approx(2 * 2 * 4 * 64 * 100 / H200.memory_bytes_per_second)
    assert eight == pytest.approx(8 * one)


def test_the_peak_of_training_is_six_flops_a_weight_and_token_and_the_causal_attention() -> None:
    flops = train_seconds(SPEC, H200, "bf16", rows=2, tokens=512) * H200.flops_per_second["bf16"]
    assert flops == pytest.approx(6 * 1024 * (SPEC.num_params - SPEC.embedding_params + 4 * 64 * 512))


@pytest.mark.slow
def test_both_bodies_of_a_whole_model_are_measured_and_slower_than_their_limits(tmp_path: Path) -> None:
    facts = resolve(read_job(write_job(tmp_path, "tiny", "local")), tmp_path)
    for share in shares(facts):
        assert share.measured.point.num_layers == facts.models.spec(Role.ACTOR).num_layers
        assert share.measured.seconds is not None
        assert 0 < share.limit_seconds < share.measured.seconds


def points_of_shards(directory: Path, name: str) -> tuple[tuple[Point, ...], Cluster]:
    facts = resolve(read_job(write_job_of_shards(directory, name, "h200")), directory)
    cluster = of_one_kind(facts.cluster, "profile")
    return imported_points(
        PPO_GRAPH, [{role: facts.models.spec(role) for role in PPO_GRAPH.roles}], [facts.workload], cluster
    ), cluster


@pytest.mark.parametrize(("name", "sizes"), [("llama-3.1-8b", (1, 2, 4, 8)), ("qwen2.5-1.5b", (1, 2))])
def test_a_profile_of_shards_has_every_tp_that_divides_the_model(
    tmp_path: Path, name: str, sizes: tuple[int, ...]
) -> None:
    heads = MODELS[name]["num_attention_heads"]
    wanted, _ = points_of_shards(tmp_path, name)
    assert {point.shape.num_heads for point in wanted} == {heads // tp for tp in sizes}


def test_a_profile_is_scored_by_the_points_that_both_tables_have(tmp_path: Path) -> None:
    wanted, cluster = points_of_shards(tmp_path, "llama-3.1-8b")
    measured = imported_table(read_operators("h200"), wanted, cluster, "bf16", "2026-11-22")
    rows = [m.model_copy(update={"seconds": 1.1 * (m.seconds or 0)}) for m in measured.measurements[:-1]]
    slower = measured.model_copy(update={"measurements": tuple(rows)})
    *_, whole = against(measured, slower)
    assert whole.used == len(wanted) - 1
    assert (whole.mean, whole.bias) == (pytest.approx(0.1), pytest.approx(0.1))
    assert sum(score.used for score in against(measured, slower)) == 2 * whole.used
