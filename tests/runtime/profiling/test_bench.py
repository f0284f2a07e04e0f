"""One point on real ranks: what fails on one of them is recorded as failed on all, and the next point still runs."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.profiles.harness import DeviceState
from meshwright.profiles.layout import Layout
from meshwright.profiles.table import Measurement, Point, Shape, TimedPass
from meshwright.runtime.device.instruments import instruments
from meshwright.runtime.inference.decode_rounds import ForwardPasses, StepRows
from meshwright.runtime.inference.decode_step import PackedStep
from meshwright.runtime.model.attention import Packing, Rotary
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.profiling.bench import NOT_FINITE, Bench
from tests.runtime.ranks import run_on_ranks

SHAPE = Shape(
    hidden_size=32,
    ffn_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_rows=32,
    scalar_head=False,
    tied_embeddings=False,
)
BODIES = tuple(TimedPass)


def point(body: TimedPass, rows: int = 2) -> Point:
    decodes, updates = body is TimedPass.DECODE, body is TimedPass.OPTIMIZER
    rows, tokens = (0, 0) if updates else (rows, 1 if decodes else 8)
    return Point(shape=SHAPE, num_layers=1, timed_pass=body, rows=rows, tokens=tokens, context=8 if decodes else 0)


def measured(body: TimedPass) -> Measurement:
    return _bench().measure_point(point(body), repeats=3, budget_seconds=10.0)


def num_passes(body: TimedPass) -> float:
    """Of the whole model, for each time that the body is called."""
    bench, passes = _bench(), []
    bench.measure_point(point(body), repeats=1, budget_seconds=10.0)
    assert bench.model is not None
    bench.model.register_forward_hook(lambda *_: passes.append(1))
    with mock.patch.object(PackedStep, "packed", autospec=True, side_effect=PackedStep.packed) as packed:
        bench.measure_point(point(body), repeats=3, budget_seconds=10.0)
    return (len(passes) + packed.call_count) / 4  # the first one warms up


def runs_of_equal_rows(body: TimedPass) -> tuple[int, int]:
    """Calls of attention and tokens in a pass over five rows of eight tokens on average."""
    bench, seen = _bench(), set[tuple[int, int]]()
    pack = Rotary.pack

    def packing(*args: Any, **options: Any) -> Packing:
        found = pack(*args, **options)
        seen.add((len(found.runs), sum(found.sizes)))
        return found

    with mock.patch.object(Rotary, "pack", autospec=True, side_effect=packing):
        bench.measure_point(point(body, rows=5), repeats=1, budget_seconds=10.0)
    return seen.pop()


def cached_in_steps(rows: int, context: int, count: int) -> list[list[int]]:
    """Of each row in so many decode steps of a point."""
    body = point(TimedPass.DECODE, rows).model_copy(update={"context": context})
    step, seen = ForwardPasses._run_steps, list[list[int]]()

    def stepped(passes: ForwardPasses, rows: StepRows) -> Tensor:
        seen.append(rows.cached.tolist())
        return step(passes, rows)

    with mock.patch.object(ForwardPasses, "_run_steps", autospec=True, side_effect=stepped):
        _bench().measure_point(body, repeats=count - 1, budget_seconds=60.0)
    return seen


def out_of_memory_on_rank_1() -> list[Measurement]:
    """The timer of rank 1 finds no memory the first time; the point after that is like any other."""
    failures = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB.\nMore.")]

    def timer(body: Callable[[], object]) -> float:
        if dist.get_rank() == 1 and failures:
            raise failures.pop()
        body()
        return 0.5 + dist.get_rank()

    bench = _bench(timer=timer)
    return [bench.measure_point(point(TimedPass.FORWARD, rows), repeats=3, budget_seconds=10.0) for rows in (2, 4)]


def not_finite_on_rank_0() -> Measurement:
    bench = _bench()
    bench.measure_point(point(TimedPass.FORWARD), repeats=1, budget_seconds=1.0)
    if dist.get_rank() == 0:
        assert bench.model is not None
        for weight in bench.model.parameters():
            weight.data.fill_(torch.nan)
    return bench.measure_point(point(TimedPass.FORWARD), repeats=1, budget_seconds=1.0)


def broken_on_every_rank() -> str:
    def timer(_: Callable[[], object]) -> float:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        _bench(timer=timer).measure_point(point(TimedPass.FORWARD), repeats=1, budget_seconds=1.0)
    return "raised"


def hot_ranks() -> Measurement:
    celsius = 50 + dist.get_rank()
    bench = _bench(conditions=lambda: DeviceState(clock_mhz=1980, celsius=celsius), peak_bytes=lambda: 2**40 + celsius)
    return bench.measure_point(point(TimedPass.FORWARD), repeats=1, budget_seconds=1.0)


def _bench(**changed: object) -> Bench:
    meshes = [build_mesh(Layout(), rank) for rank in range(dist.get_world_size())]
    watch = replace(instruments(), **changed)
    return Bench(meshes[dist.get_rank()], watch, precision="fp32", max_positions=64)


@pytest.mark.parametrize("body", BODIES)
def test_every_rank_has_the_same_measurement(body: TimedPass) -> None:
    one, other = run_on_ranks(2, measured, body)
    assert one == other
    assert one.status == "ok"
    assert one.seconds
    assert one.repeats == 3
    assert (one.clock_mhz, one.celsius) == (None, None)


@pytest.mark.parametrize("body", [TimedPass.FORWARD, TimedPass.PREFILL, TimedPass.TRAIN])
def test_all_rows_of_a_point_pass_the_model_together(body: TimedPass) -> None:
    assert run_on_ranks(1, num_passes, body) == [1.0]


@pytest.mark.parametrize("body", [TimedPass.FORWARD, TimedPass.TRAIN])
def test_rows_of_a_point_have_lengths_of_their_own_as_in_a_run_and_its_mean(body: TimedPass) -> None:
    assert run_on_ranks(1, runs_of_equal_rows, body) == [(5, 5 * 8)]


def test_rows_of_a_decode_point_go_on_end_and_begin_and_have_its_context_on_average() -> None:
    [seen] = run_on_ranks(1, cached_in_steps, 8, 40, 210)
    assert sorted(seen[0]) == [9, 18, 26, 35, 44, 53, 61, 70]
    assert len(seen) == 210
    assert {length for cached in seen for length in cached} == set(range(5, 76))
    for before, after in itertools.pairwise(seen):
        assert all(now in (earlier + 1, 5) for earlier, now in zip(before, after, strict=True))
    assert statistics.mean(statistics.mean(cached) for cached in seen) == pytest.approx(40, rel=0.02)


def test_one_row_of_a_decode_point_stays_where_it_is() -> None:
    assert run_on_ranks(1, cached_in_steps, 1, 40, 5) == [[[40]] * 5]


def test_no_memory_on_one_rank_is_a_failure_on_all_and_the_next_point_runs() -> None:
    for first, second in run_on_ranks(2, out_of_memory_on_rank_1):
        assert (first.status, first.seconds) == ("failed", None)
        assert first.reason == "out of memory: CUDA out of memory. Tried to allocate 80 GiB."
        assert (second.status, second.seconds) == ("ok", 1.0)


def test_an_output_that_is_not_finite_is_a_failure() -> None:
    assert {(m.status, m.reason) for m in run_on_ranks(2, not_finite_on_rank_0)} == {("failed", NOT_FINITE)}


def test_a_fault_of_the_program_is_not_recorded_as_one_of_the_device() -> None:
    assert run_on_ranks(2, broken_on_every_rank) == ["raised", "raised"]


def test_a_measurement_has_the_conditions_of_the_hottest_device_and_the_most_memory() -> None:
    one, _ = run_on_ranks(2, hot_ranks)
    assert (one.clock_mhz, one.celsius) == (1980, 51)
    assert one.peak_bytes is not None
    assert one.peak_bytes > 2**39
