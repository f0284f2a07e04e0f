"""What to measure, and how a callable is timed. Clocks and events are arguments; no model is built here.

    timer = event_timer(lambda: torch.cuda.Event(enable_timing=True))  # or clock_timer(perf_counter, synchronise)
    for point in points(graph, {Role.ACTOR: actor, ...}, workload, cluster):
        model = build(point.shape.model(num_layers=point.num_layers, max_positions=workload.max_tokens))
        try:
            sample = measure(body, timer=timer, clock=perf_counter, warmup=1, repeats=5, budget_seconds=1.0)
            rows.append(record(point, sample, peak_bytes))
        except OutOfMemory as error:
            rows.append(failure(point, str(error)))
    for exchange in exchanges(cluster, num_ranks):
        ...; collectives.append(record_collective(exchange, sample))
    write_table(path, Table(provenance=Provenance(...), measurements=tuple(rows), collectives=tuple(collectives)))

`points` come sorted so that those of one shape and number of layers are consecutive: build once, time many.
One body contains, on one rank and without tensor-parallel collectives:

- forward: rows x tokens, packed one row behind the other, through embedding, layers and head, without gradients;
  log-probabilities of the tokens (vocabulary head) or one value per token (scalar head); rows taken from the
  experience and put back.
- train: forward, loss and backward of one micro-batch, nothing recomputed; no reduction, no optimizer.
- optimizer: zeroing the gradients and one step over all parameters of the shard, on one replica.
- prefill: rows x tokens written into an empty cache, logits and sampling of the last token of each row, and handing
  what was drawn to the host.
- decode: one new token for each of `rows` rows that have `context` tokens cached on average, with the same at its end;
  their lengths are spread evenly from few tokens to twice as many, and the longest make way for new ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self, TypeAlias, TypeVar

from meshwright.profiles.cluster import Cluster
from meshwright.profiles.layout import Layout, divisors, layout_violations
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import Mode, Role, StageGraph
from meshwright.profiles.table import Body, Collective, Exchange, Measurement, Point, Shape, shape_of
from meshwright.profiles.workload import Workload

DEPTHS = {
    "cpu": dict.fromkeys(Body, (1, 4)),
    "cuda": {body: (1, 8) if body is Body.DECODE else (1, 2) for body in Body},
}
"""Two depths separate the time of a layer from that of the embedding and the head. On a CPU, whose times are noisy and
whose models are small, the depths are further apart; so are those of a decode step on a GPU, of which a recorded layer
takes 0.05 ms and the host 0.4 ms, give or take 0.1 (0.9 thousand numbers, H200, 2026-11-26). Of what is trained more
layers of the largest models would not fit."""

_LADDER = 4
"""Ratio between neighbouring row counts; times are near linear in rows, so a coarse ladder interpolates well."""

_MAX_ROWS = {
    "cpu": {Body.FORWARD: 32, Body.TRAIN: 16, Body.PREFILL: 16, Body.DECODE: 256},
    "cuda": dict.fromkeys(Body, 256),
}
_MAX_TOKENS = {"cpu": 32768, "cuda": 131072}
"""Beyond these it is extrapolated: by then a device is busy and time is proportional to rows. A GPU is not before the
host, which launches its kernels one by one, has fallen behind: layers of 0.9 thousand numbers took as long for 4,000
tokens as for 17,000 (H200, 2026-11-26)."""

_EXCHANGE_BYTES = (2**12, 2**16, 2**20, 2**24)
"""From what latency decides to what bandwidth does; seconds are near linear in bytes between them."""

_OPERATIONS: tuple[Literal["all_reduce", "all_gather", "reduce_scatter", "send_receive"], ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "send_receive",
)
_BODIES = {
    Mode.PREFILL: (Body.PREFILL,),
    Mode.DECODE: (Body.DECODE,),
    Mode.FORWARD: (Body.FORWARD,),
    Mode.TRAIN: (Body.TRAIN, Body.OPTIMIZER),
}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What repeated timing of one callable gave; `spread_seconds` is the interquartile range."""

    median_seconds: float
    spread_seconds: float
    repeats: int


@dataclass(frozen=True)
class Conditions:
    """The state of a device while it was timed; None where it does not tell."""

    clock_mhz: int | None = None
    celsius: int | None = None


T = TypeVar("T", Measurement, Collective)

Timer: TypeAlias = Callable[[Callable[[], object]], float]
"""Seconds of one call, until the device has done all that the call asked of it."""


class Event(Protocol):
    """A mark on a device's timeline, as `torch.cuda.Event` is."""

    def record(self) -> None:
        """Sets the mark behind everything asked of the device so far."""
        ...

    def synchronize(self) -> None:
        """Waits until the device has passed the mark."""
        ...

    def elapsed_time(self, end: Self) -> float:
        """Milliseconds from this mark to another."""
        ...


def clock_timer(clock: Callable[[], float], synchronise: Callable[[], object]) -> Timer:
    """Times by a clock of this host, in seconds."""

    def timed(body: Callable[[], object]) -> float:
        start = clock()
        body()
        synchronise()
        return clock() - start

    return timed


def event_timer(mark: Callable[[], Event]) -> Timer:
    """Times by marks on the device's own timeline; what the device waits for its host between them counts."""

    def timed(body: Callable[[], object]) -> float:
        start, end = mark(), mark()
        start.record()
        body()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return timed


def measure(
    body: Callable[[], object],
    *,
    timer: Timer,
    clock: Callable[[], float],
    warmup: int,
    repeats: int,
    budget_seconds: float,
    least_seconds: float = 0.0,
    before: Callable[[], object] = lambda: None,
    together: int = 1,
) -> Sample:
    """Times `body` `repeats` times, and more often until the times sum to `least_seconds`: at least once, and no more
    when the budget (warm-up included) is spent.

    `before` runs untimed ahead of each call. Each of the times is the mean of `together` calls: a stage that makes
    many calls takes as long as their sum, in which the slow ones count.
    """
    began = clock()
    for _ in range(warmup):
        before()
        timer(body)
    times: list[float] = []
    total = 0.0
    while (len(times) < repeats or total < least_seconds) and (not times or clock() - began < budget_seconds):
        calls = []
        for _ in range(together):
            before()
            calls.append(timer(body))
        times.append(statistics.fmean(calls))
        total += sum(calls)
    return Sample(median_seconds=statistics.median(times), spread_seconds=_interquartile(times), repeats=len(times))


def record(
    point: Point, sample: Sample, peak_bytes: int | None = None, conditions: Conditions | None = None
) -> Measurement:
    """The measurement of a point that ran."""
    conditions = conditions or Conditions()
    return Measurement(
        point=point,
        seconds=sample.median_seconds,
        spread_seconds=sample.spread_seconds,
        repeats=sample.repeats,
        peak_bytes=peak_bytes,
        clock_mhz=conditions.clock_mhz,
        celsius=conditions.celsius,
    )


def failure(point: Point, reason: str) -> Measurement:
    """The measurement of a point that did not run."""
    return Measurement(point=point, status="failed", reason=reason)


def record_collective(exchange: Exchange, sample: Sample) -> Collective:
    """The measurement of a collective that ran."""
    return Collective(
        exchange=exchange,
        seconds=sample.median_seconds,
        spread_seconds=sample.spread_seconds,
        repeats=sample.repeats,
    )


def merged(turns: Sequence[T]) -> T:
    """One measurement from several of the same point or collective, made at different times; the first failure if any.

    The median of the turns' medians leaves out a turn in which the machine was disturbed, which consecutive repeats
    cannot.
    """
    for found in turns:
        if found.status == "failed":
            return found
    seconds = [found.seconds for found in turns if found.seconds is not None]
    spreads = [found.spread_seconds for found in turns if found.spread_seconds is not None]
    peaks = [found.peak_bytes for found in turns if found.peak_bytes is not None]
    update = {
        "seconds": statistics.median(seconds),
        "spread_seconds": max(*spreads, _interquartile(seconds)),
        "repeats": sum(found.repeats for found in turns),
        "peak_bytes": statistics.median_high(peaks) if peaks else None,
    }
    return turns[-1].model_copy(update=update)


def points(
    graph: StageGraph,
    specs: Mapping[Role, ModelSpec],
    workload: Workload,
    cluster: Cluster,
    *,
    staleness: int = 0,
) -> tuple[Point, ...]:
    """A small grid from which every stage of the graph that has a model can be interpolated, each point once.

    As many batches as `staleness` allows beyond the first may be decoded together.
    """
    found = {
        Point(shape=shape, num_layers=num_layers, body=body, rows=rows, tokens=tokens, context=context): None
        for shape, bodies in _shapes(graph, specs, cluster).items()
        for num_layers in sorted({depth for depths in DEPTHS[cluster.device.kind].values() for depth in depths})
        for body in bodies
        if num_layers in DEPTHS[cluster.device.kind][body]
        for rows, tokens, context in _grid(body, workload, cluster.device.kind, staleness)
    }
    return tuple(found)


def exchanges(cluster: Cluster, num_ranks: int | None = None) -> tuple[Exchange, ...]:
    """The collectives to measure: every group size that divides a node; messages between two ranks only.

    Groups of more than `num_ranks` ranks, when it is given, are left out: this machine has no more.
    """
    most = cluster.ranks_per_node if num_ranks is None else num_ranks
    return tuple(
        Exchange(operation=operation, num_ranks=size, num_bytes=num_bytes)
        for size in divisors(cluster.ranks_per_node)[1:]
        for operation in _OPERATIONS
        for num_bytes in _EXCHANGE_BYTES
        if size <= most and (operation != "send_receive" or size == 2)
    )


def _shapes(graph: StageGraph, specs: Mapping[Role, ModelSpec], cluster: Cluster) -> dict[Shape, tuple[Body, ...]]:
    """Each shape a legal tensor-parallel degree makes, with the bodies that some role runs on it."""
    wanted: dict[Shape, set[Body]] = {}
    for stage in graph.stages:
        model = specs.get(stage.role)
        if model is None:
            continue
        for tp in divisors(cluster.ranks_per_node):
            if not layout_violations(Layout(tp=tp), model):
                bodies = wanted.setdefault(shape_of(model, tp), set())
                bodies.update(body for mode in stage.modes for body in _BODIES[mode])
    return {shape: tuple(body for body in Body if body in bodies) for shape, bodies in wanted.items()}


def _grid(body: Body, workload: Workload, kind: str, staleness: int) -> Iterator[tuple[int, int, int]]:
    """(rows, tokens, context) at which a body is timed."""
    if body is Body.OPTIMIZER:
        yield 0, 0, 0
        return
    shortest_prompt, longest_prompt = workload.prompt_lengths.tokens[0], workload.prompt_lengths.maximum
    shortest = shortest_prompt + workload.response_lengths.tokens[0]
    longest = longest_prompt + workload.response_lengths.maximum
    lengths = {
        Body.PREFILL: _between(shortest_prompt, longest_prompt),
        Body.DECODE: _between(shortest_prompt, longest - 1),  # the last token drawn is never cached
    }.get(body, _between(shortest, longest))
    together = 1 + staleness if body is Body.DECODE else 1
    most = (workload if body is Body.TRAIN else workload.candidates).batch_size
    for rows in _ladder(min(together * most, _MAX_ROWS[kind][body])):
        for length in lengths:
            if body is Body.DECODE:
                yield rows, 1, length
            elif rows == 1 or rows * length <= _MAX_TOKENS[kind]:
                yield rows, length, 0


def _ladder(top: int) -> tuple[int, ...]:
    """1, 4, 16, ... and `top` itself."""
    rows = [1]
    while rows[-1] * _LADDER < top:
        rows.append(rows[-1] * _LADDER)
    return tuple(sorted({*rows, top}))


def _between(low: int, high: int) -> tuple[int, ...]:
    """The two lengths and their geometric mean, each once."""
    return tuple(sorted({low, math.isqrt(low * high), high}))


def _interquartile(times: list[float]) -> float:
    if len(times) < 2:
        return 0.0
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return third - first
