"""The grid of points that a profile measures, and how a callable is timed.

Clocks and events are arguments, and the caller builds the models:

    timer = event_timer(lambda: torch.cuda.Event(enable_timing=True))  # or clock_timer(perf_counter, synchronise)
    for point in points(graph, {Role.ACTOR: actor, ...}, workload, cluster):
        model = build(point.shape.model(num_layers=point.num_layers, max_positions=workload.max_tokens))
        try:
            sample = measure(run_pass, timer=timer, clock=perf_counter, warmup=1, repeats=5, budget_seconds=1.0)
            rows.append(record(point, sample, peak_bytes))
        except OutOfMemory as error:
            rows.append(failed_measurement(point, str(error)))
    for exchange in exchanges(cluster, num_ranks):
        ...; collectives.append(record_collective(exchange, sample))
    write_table(path, Table(provenance=Provenance(...), measurements=tuple(rows), collectives=tuple(collectives)))

`points` are sorted so that those with the same shape and number of layers are consecutive and share one model.
A timed pass (`TimedPass`) runs on one rank without tensor-parallel collectives. It contains:

- forward: rows x tokens, packed without padding, through embedding, layers and head, without gradients;
  log-probabilities of the tokens (vocabulary head) or one value per token (scalar head); reading rows from the
  experience and writing the results back.
- train: forward, loss and backward of one micro-batch without recomputation, gradient reduction or optimizer step.
- optimizer: zeroing the gradients and one optimizer step over all parameters of the shard, on one replica.
- prefill: rows x tokens written into an empty KV cache, logits and sampling of the last token of each row, and the copy
  of the sampled tokens to the host.
- decode: one new token for each of `rows` rows that have `context` tokens cached on average, with logits, sampling and
  copy as above; row lengths are spread evenly from a few tokens to twice `context`, and the longest rows are replaced
  by new ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self, TypeAlias, TypeVar

from meshwright.profiles.hardware import Cluster, Device
from meshwright.profiles.layout import Layout, divisors, layout_violations
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import Mode, Role, StageGraph
from meshwright.profiles.table import Collective, Exchange, Measurement, Point, Shape, TimedPass, shape_of
from meshwright.profiles.workload import Workload

_CPU_DEPTHS = (1, 4)
_DECODE_DEPTHS = (1, 8)
"""Numbers of layers at which passes are timed on a CPU, and decode steps on a GPU: two depths separate the time of a
layer from that of embedding and head.

A layer of a decode step in a CUDA graph takes 0.05 ms and the host 0.4 +- 0.1 ms (hidden size 896, H200, 2026-11-26),
so that its depths are further apart."""

_STATE_BYTES = 18
"""Bytes of a parameter in training: bf16 weight, fp32 gradient, fp32 weight and two moments of AdamW."""

_LADDER = 4
"""Ratio of consecutive row counts; times are nearly linear in rows, so a coarse grid interpolates well."""

_MAX_ROWS = {
    "cpu": {TimedPass.FORWARD: 32, TimedPass.TRAIN: 16, TimedPass.PREFILL: 16, TimedPass.DECODE: 256},
    "cuda": dict.fromkeys(TimedPass, 256),
}
_MAX_TOKENS = {"cpu": 32768, "cuda": 131072}
"""Beyond these limits times are extrapolated: the device is saturated and time is proportional to rows.

A GPU is saturated only once its kernels take longer than the host needs to launch them: layers of hidden size 896 took
as long for 4,000 tokens as for 17,000 (H200, 2026-11-26)."""

_EXCHANGE_BYTES = (2**12, 2**16, 2**20, 2**24)
"""Message sizes from latency-bound to bandwidth-bound; seconds are nearly linear in bytes between them."""

_OPERATIONS: tuple[Literal["all_reduce", "all_gather", "reduce_scatter", "send_receive"], ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "send_receive",
)
_PASSES = {
    Mode.PREFILL: (TimedPass.PREFILL,),
    Mode.DECODE: (TimedPass.DECODE,),
    Mode.FORWARD: (TimedPass.FORWARD,),
    Mode.TRAIN: (TimedPass.TRAIN, TimedPass.OPTIMIZER),
}


@dataclass(frozen=True, kw_only=True)
class TimingResult:
    """Result of timing one callable repeatedly; `spread_seconds` is the interquartile range."""

    median_seconds: float
    spread_seconds: float
    repeats: int


@dataclass(frozen=True)
class DeviceState:
    """State of a device while it was timed; None where the device does not report it."""

    clock_mhz: int | None = None
    celsius: int | None = None


T = TypeVar("T", Measurement, Collective)

Timer: TypeAlias = Callable[[Callable[[], object]], float]
"""Returns the seconds of one call, until the device has completed all work that the call launched."""


class Event(Protocol):
    """An event on a device's timeline, such as `torch.cuda.Event`."""

    def record(self) -> None:
        """Record the event after all work that was launched so far."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has reached the event."""
        ...

    def elapsed_time(self, end: Self) -> float:
        """Milliseconds from this event to another."""
        ...


def clock_timer(clock: Callable[[], float], synchronise: Callable[[], object]) -> Timer:
    """Return a timer that reads a clock of this host, in seconds."""

    def clock_seconds(call: Callable[[], object]) -> float:
        start = clock()
        call()
        synchronise()
        return clock() - start

    return clock_seconds


def event_timer(new_event: Callable[[], Event]) -> Timer:
    """Return a timer that reads events on the device's timeline; time in which the device waits for the host counts."""

    def event_seconds(call: Callable[[], object]) -> float:
        start, end = new_event(), new_event()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return event_seconds


def measure(
    run_pass: Callable[[], object],
    *,
    timer: Timer,
    clock: Callable[[], float],
    warmup: int,
    repeats: int,
    budget_seconds: float,
    min_seconds: float = 0.0,
    before: Callable[[], object] = lambda: None,
    calls_per_sample: int = 1,
) -> TimingResult:
    """Time `run_pass` `repeats` times, or more until the times sum to `min_seconds`.

    Timing stops early, after one repeat at least, once the budget (which includes the warm-up) is spent.
    `before` runs untimed ahead of each call. Each recorded time is the mean of `calls_per_sample` calls: a stage
    makes many calls and takes the sum of their times, so slow outliers must count.
    """
    start = clock()
    for _ in range(warmup):
        before()
        timer(run_pass)
    samples: list[float] = []
    timed_seconds = 0.0
    while (len(samples) < repeats or timed_seconds < min_seconds) and (not samples or clock() - start < budget_seconds):
        call_seconds = []
        for _ in range(calls_per_sample):
            before()
            call_seconds.append(timer(run_pass))
        samples.append(statistics.fmean(call_seconds))
        timed_seconds += sum(call_seconds)
    return TimingResult(
        median_seconds=statistics.median(samples), spread_seconds=_interquartile(samples), repeats=len(samples)
    )


def record(
    point: Point, sample: TimingResult, peak_bytes: int | None = None, conditions: DeviceState | None = None
) -> Measurement:
    """Return the measurement of a point that ran."""
    conditions = conditions or DeviceState()
    return Measurement(
        point=point,
        seconds=sample.median_seconds,
        spread_seconds=sample.spread_seconds,
        repeats=sample.repeats,
        peak_bytes=peak_bytes,
        clock_mhz=conditions.clock_mhz,
        celsius=conditions.celsius,
    )


def failed_measurement(point: Point, reason: str) -> Measurement:
    """Return the measurement of a point that did not run."""
    return Measurement(point=point, status="failed", reason=reason)


def record_collective(exchange: Exchange, sample: TimingResult) -> Collective:
    """Return the measurement of a collective that ran."""
    return Collective(
        exchange=exchange,
        seconds=sample.median_seconds,
        spread_seconds=sample.spread_seconds,
        repeats=sample.repeats,
    )


def merge_measurements(measurements: Sequence[T]) -> T:
    """Merge measurements of one point or collective from several sweeps of the grid; the first failure if there is one.

    The median over sweeps ignores a sweep in which the machine was disturbed; consecutive repeats may all be disturbed.
    """
    for one in measurements:
        if one.status == "failed":
            return one
    seconds = [one.seconds for one in measurements if one.seconds is not None]
    spreads = [one.spread_seconds for one in measurements if one.spread_seconds is not None]
    peaks = [one.peak_bytes for one in measurements if one.peak_bytes is not None]
    update = {
        "seconds": statistics.median(seconds),
        "spread_seconds": max(*spreads, _interquartile(seconds)),
        "repeats": sum(one.repeats for one in measurements),
        "peak_bytes": statistics.median_high(peaks) if peaks else None,
    }
    return measurements[-1].model_copy(update=update)


def points(
    graph: StageGraph,
    specs: Mapping[Role, ModelSpec],
    workload: Workload,
    cluster: Cluster,
    *,
    staleness: int = 0,
) -> tuple[Point, ...]:
    """Return a small grid of distinct points from which the time of every stage with a model can be interpolated.

    Up to 1 + `staleness` batches may be decoded together.
    """
    grid = {
        Point(
            shape=shape, num_layers=num_layers, timed_pass=timed_pass, rows=rows, tokens=tokens, context=context
        ): None
        for shape, depths in _depths(graph, specs, cluster).items()
        for num_layers in sorted({depth for both in depths.values() for depth in both})
        for timed_pass in depths
        if num_layers in depths[timed_pass]
        for rows, tokens, context in _grid(timed_pass, workload, cluster.device.kind, staleness)
    }
    return tuple(grid)


def generation_points(
    shape: Shape, depths: Sequence[int], workload: Workload, kind: str, *, staleness: int = 0
) -> tuple[Point, ...]:
    """Return the prefills and decode steps of `points` for one shape and these numbers of layers."""
    return tuple(
        Point(shape=shape, num_layers=num_layers, timed_pass=timed_pass, rows=rows, tokens=tokens, context=context)
        for num_layers in depths
        for timed_pass in (TimedPass.PREFILL, TimedPass.DECODE)
        for rows, tokens, context in _grid(timed_pass, workload, kind, staleness)
    )


def exchanges(cluster: Cluster, num_ranks: int | None = None) -> tuple[Exchange, ...]:
    """Return the collectives to measure: all group sizes that divide a node; send-receive between two ranks only.

    `num_ranks`, if given, is the number of ranks of this machine: larger groups are left out.
    """
    max_ranks = cluster.ranks_per_node if num_ranks is None else num_ranks
    return tuple(
        Exchange(operation=operation, num_ranks=size, num_bytes=num_bytes)
        for size in divisors(cluster.ranks_per_node)[1:]
        for operation in _OPERATIONS
        for num_bytes in _EXCHANGE_BYTES
        if size <= max_ranks and (operation != "send_receive" or size == 2)
    )


def _depths(
    graph: StageGraph, specs: Mapping[Role, ModelSpec], cluster: Cluster
) -> dict[Shape, dict[TimedPass, tuple[int, int]]]:
    """The shapes of all legal tensor-parallel degrees, with the passes that some role runs on each and their depths."""
    passes_by_shape: dict[Shape, set[TimedPass]] = {}
    deepest: dict[Shape, int] = {}
    for stage in graph.stages:
        model = specs.get(stage.role)
        if model is None:
            continue
        for tp in divisors(cluster.ranks_per_node):
            if not layout_violations(Layout(tp=tp), model):
                shape = shape_of(model, tp)
                passes = passes_by_shape.setdefault(shape, set())
                passes.update(timed_pass for mode in stage.modes for timed_pass in _PASSES[mode])
                deepest[shape] = max(deepest.get(shape, 0), max_timed_layers(model, tp, cluster.device))
    return {
        shape: {
            timed_pass: _depths_of(timed_pass, cluster.device.kind, deepest[shape])
            for timed_pass in TimedPass
            if timed_pass in passes
        }
        for shape, passes in passes_by_shape.items()
    }


def max_timed_layers(model: ModelSpec, tp: int, device: Device) -> int:
    """The most layers of one of `tp` shards of the model whose training state fits in half of the device's memory.

    It is at least 2, and otherwise at most the model's number of layers. On a GPU the host launches a pass of few
    layers while the device computes the head, and falls behind in a pass of many: log-probabilities of 24 layers of
    hidden size 896 took 0.33 s where the times of one and of two layers predict 0.13 s (H200, 2026-11-27).
    """
    shard = model.shard(tp)
    ends = shard.num_params - shard.num_layers * shard.layer_params
    fitting = (device.memory_bytes / 2 / _STATE_BYTES - ends) / shard.layer_params
    return max(2, min(model.num_layers, math.floor(fitting)))


def _depths_of(timed_pass: TimedPass, kind: str, deepest: int) -> tuple[int, int]:
    if kind == "cpu":
        return _CPU_DEPTHS
    return _DECODE_DEPTHS if timed_pass is TimedPass.DECODE else (1, deepest)


def _grid(timed_pass: TimedPass, workload: Workload, kind: str, staleness: int) -> Iterator[tuple[int, int, int]]:
    """The (rows, tokens, context) at which a pass is timed."""
    if timed_pass is TimedPass.OPTIMIZER:
        yield 0, 0, 0
        return
    shortest_prompt, longest_prompt = workload.prompt_lengths.tokens[0], workload.prompt_lengths.maximum
    shortest = shortest_prompt + workload.response_lengths.tokens[0]
    longest = longest_prompt + workload.response_lengths.maximum
    lengths = {
        TimedPass.PREFILL: _between(shortest_prompt, longest_prompt),
        TimedPass.DECODE: _between(shortest_prompt, longest - 1),  # the last sampled token is never cached
    }.get(timed_pass, _between(shortest, longest))
    batches_in_flight = 1 + staleness if timed_pass is TimedPass.DECODE else 1
    batch_size = (workload if timed_pass is TimedPass.TRAIN else workload.candidates).batch_size
    for rows in _ladder(min(batches_in_flight * batch_size, _MAX_ROWS[kind][timed_pass])):
        for length in lengths:
            if timed_pass is TimedPass.DECODE:
                yield rows, 1, length
            elif rows == 1 or rows * length <= _MAX_TOKENS[kind]:
                yield rows, length, 0


def _ladder(top: int) -> tuple[int, ...]:
    """The row counts 1, 4, 16, ... below `top`, and `top` itself."""
    rows = [1]
    while rows[-1] * _LADDER < top:
        rows.append(rows[-1] * _LADDER)
    return tuple(sorted({*rows, top}))


def _between(low: int, high: int) -> tuple[int, ...]:
    """The two lengths and their geometric mean, without duplicates."""
    return tuple(sorted({low, math.isqrt(low * high), high}))


def _interquartile(times: list[float]) -> float:
    if len(times) < 2:
        return 0.0
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return third - first
