"""Timing of an engine in its own process as a run uses it: rounds by rows and context, prefills, and new weights.

Every rank starts a process beside itself, and all of them work at once. Each tensor-parallel degree that a replica may
have is timed with its collectives, at two numbers of layers of the actor's configuration, one after another: the
actor's own and a smaller one. A round is timed from the request of the rank to the sampled tokens, messages included.
"""

from __future__ import annotations

import datetime
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from meshwright.planner.job.job import Facts
from meshwright.planner.plan.layout_and_schedule_rules import layout_rules
from meshwright.profiles.frameworks import EngineName, EngineSleep
from meshwright.profiles.harness import (
    TimingResult,
    clock_timer,
    generation_points,
    measure,
    merge_measurements,
    record,
)
from meshwright.profiles.layout import Layout, divisors
from meshwright.profiles.packing import BLOCK_TOKENS, num_blocks_for
from meshwright.profiles.stages import GENERATE, Role
from meshwright.profiles.table import EngineTimings, Measurement, Point, Table, TimedPass, WeightLoad, shape_of
from meshwright.runtime.inference.engine_process import (
    EngineProcess,
    EngineSettings,
    EngineShard,
    Request,
    RequestSampling,
)
from meshwright.runtime.inference.external_replica import refit_tensors, stored_tensors
from meshwright.runtime.model.adapters import is_adapter_parameter
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import Decoder, build_model
from meshwright.runtime.profiling.bench import is_over, merge_ranks, row_lengths
from meshwright.runtime.rollout.external_engine import VERSIONS, cached_token_bytes, engine_adapter, shard_of_rank
from meshwright.runtime.training.weight_copies import DTYPES

_SWEEPS = 3
"""Sweeps through the points of a model, so that the repeats of a point lie some time apart."""

_REPEATS = 3
"""Repeats of a point in a sweep, and of the load of new weights."""

_MIN_SECONDS = 0.03
"""Shortest time for which a point is timed in a sweep."""

_ANSWER_SECONDS = 600.0
"""Time limit of one pass: a prefill of all points is one round here."""

_MAX_STEPS = 256
"""Decode steps that a sequence may take while a point is timed."""

_STEPS_BEFORE_MEAN = 4
"""Decode steps after which a sequence has about its mean length: half of those that are usually timed."""


@dataclass(frozen=True, kw_only=True)
class TimedEngine:
    """An engine to be timed: its interpreter, the directory of the model, and the filters of the job's sampling.

    What it prints is in files whose names begin with that of `log`.
    """

    name: EngineName
    python: Path
    model: Path
    top_k: int
    top_p: float
    log: Path


class Depth(NamedTuple):
    """A number of layers of the actor, sharded over `tp` ranks."""

    tp: int
    num_layers: int


def missing_of_engine(facts: Facts, table: Table, name: EngineName) -> tuple[tuple[Point, ...], tuple[Depth, ...]]:
    """Return the points of an engine that the table lacks, and the depths at which it lacks the load of weights."""
    timings, actor, depths = table.timings_of(name), facts.models.spec(Role.ACTOR), _depths(facts, name)
    known = {one.point for one in timings.measurements} if timings else set()
    loaded = {(one.shape, one.num_layers) for one in timings.loads} if timings else set()
    points = (
        point
        for depth in depths
        for point in generation_points(
            shape_of(actor, depth.tp),
            (depth.num_layers,),
            facts.workload,
            facts.cluster.kind,
            staleness=facts.staleness,
        )
    )
    return (
        tuple(point for point in points if point not in known),
        tuple(depth for depth in depths if (shape_of(actor, depth.tp), depth.num_layers) not in loaded),
    )


def _depths(facts: Facts, name: EngineName) -> tuple[Depth, ...]:
    """Return the depths at which an engine is timed, for each legal degree: the actor's own number of layers, and
    one."""
    actor, with_engine = facts.models.spec(Role.ACTOR), facts.model_copy(update={"engine": name})
    stage = facts.graph.by_name[GENERATE]
    return tuple(
        Depth(tp, num_layers)
        for tp in divisors(facts.cluster.ranks_per_node)
        if not layout_rules(with_engine, stage, Layout(tp=tp))
        for num_layers in (1, max(2, actor.num_layers))
    )


def measure_engine(facts: Facts, table: Table, engine: TimedEngine, seconds: float) -> EngineTimings:
    """Time those points of an engine that the table lacks, for about `seconds` beside its starts. Collective.

    Raises RunFailed if the engine fails.
    """
    missing_points, missing_loads = missing_of_engine(facts, table, engine.name)
    known, actor = table.timings_of(engine.name), facts.models.spec(Role.ACTOR)
    points_of: dict[Depth, list[Point]] = {depth: [] for depth in missing_loads}
    degrees = {shape_of(actor, depth.tp): depth.tp for depth in _depths(facts, engine.name)}
    for point in missing_points:
        points_of.setdefault(Depth(degrees[point.shape], point.num_layers), []).append(point)
    measured: list[Measurement] = []
    loads: list[WeightLoad] = []
    process_bytes = 0.0
    for depth, points in sorted(points_of.items()):
        bench = EngineBench(facts, engine, depth, points)
        try:
            kernels = bench.start()
            if depth in missing_loads:
                loads.append(bench.measure_load())
            measured += bench.measure_points(points, time.monotonic() + seconds / len(points_of))
            process_bytes = max(process_bytes, bench.process_bytes())
            sleep = bench.measure_sleep()
        finally:
            bench.close()
        version, names = kernels
        new = EngineTimings(
            engine=engine.name,
            version=version,
            kernels=names,
            date=datetime.date.today().isoformat(),
            measurements=tuple(measured),
            loads=tuple(loads),
            process_bytes=process_bytes,
            sleep=sleep,
        )
        known = _merged(known, new) if known else new
    assert known is not None
    return known


def _merged(known: EngineTimings, new: EngineTimings) -> EngineTimings:
    """Return the known times of the same version with the new ones; those of another version are dropped."""
    if (known.version, known.kernels) != (new.version, new.kernels):
        return new
    measurements = {one.point: one for one in (*known.measurements, *new.measurements)}
    loads = {(one.shape, one.num_layers): one for one in (*known.loads, *new.loads)}
    process_bytes = max(known.process_bytes or 0.0, new.process_bytes or 0.0)
    return new.model_copy(
        update={
            "measurements": tuple(measurements.values()),
            "loads": tuple(loads.values()),
            "process_bytes": process_bytes,
        }
    )


class EngineBench:
    """Times the processes of an engine whose model has a depth. All ranks call the same methods."""

    def __init__(self, facts: Facts, engine: TimedEngine, depth: Depth, points: Sequence[Point]) -> None:
        num_ranks = dist.get_world_size()
        self._spec = replace(facts.models.spec(Role.ACTOR), num_layers=depth.num_layers)
        self._layout = Layout(tp=depth.tp, dp=num_ranks // depth.tp)
        self._dtype, self._engine = DTYPES[facts.precision], engine
        self._ids, self._rng = itertools.count(), np.random.default_rng(0)
        self._versions = itertools.count()
        rank, shard = dist.get_rank(), shard_of_rank(self._layout, 0)
        assert shard is not None, f"tp={depth.tp} does not divide the {num_ranks} ranks"
        settings = self._settings(facts, points, shard)
        self._cache_bytes = settings.cache_bytes
        self._process = EngineProcess(
            engine.python,
            settings,
            log=engine.log.with_name(f"{engine.log.name}-{rank}.log"),
            rank=rank,
            num_threads=torch.get_num_threads(),
            answer_seconds=_ANSWER_SECONDS,
        )

    def start(self) -> tuple[str, str]:
        """Wait until the engine runs, and give it weights; return its version and its kernels."""
        facts = self._process.wait_until_ready(VERSIONS[self._engine.name])
        model = build_model(self._spec, build_mesh(self._layout, 0), dtype=self._dtype)
        assert isinstance(model, Decoder)  # its layout has no pipeline
        self._model = model
        if self._spec.adapter:
            self._process.take_base_weights(stored_tensors(model))
        self._load()
        return facts.version, facts.kernels

    def process_bytes(self) -> float:
        """Return the memory of the process beside its weights and its KV cache, on the rank with most. Collective."""
        weights_bytes = sum(
            tensor.numel() * tensor.element_size()
            for name, tensor in self._model.named_parameters()
            if not is_adapter_parameter(name)
        )
        own_bytes = torch.tensor(float(self._process.resident_bytes - self._cache_bytes - weights_bytes))
        dist.all_reduce(own_bytes, dist.ReduceOp.MAX)
        return max(1.0, own_bytes.item())

    def _load(self) -> None:
        """Give the engine the tensors of a refit."""
        self._process.take_weights(next(self._versions), refit_tensors(self._model))

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def measure_points(self, points: Sequence[Point], end: float) -> Iterator[Measurement]:
        """Yield the measurements of the points, in several sweeps; of fewer points if the time is over at `end`."""
        sweeps: dict[Point, list[Measurement]] = defaultdict(list)
        for _ in range(_SWEEPS):
            for point in points:
                if is_over(end):
                    break
                sweeps[point].append(self._measure(point))
        yield from map(merge_measurements, sweeps.values())

    def measure_load(self) -> WeightLoad:
        """Time the load of new weights: of the adapter if the actor has one, else of all."""
        sample = self._time(self._load)
        return WeightLoad(
            shape=shape_of(self._spec, self._layout.tp),
            num_layers=self._spec.num_layers,
            seconds=sample.median_seconds,
            spread_seconds=sample.spread_seconds,
            repeats=sample.repeats,
        )

    def measure_sleep(self) -> EngineSleep:
        """Time how fast the KV cache is freed and taken again, by medians of the slowest rank. Collective."""
        seconds = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            freed = self._process.sleep()
            asleep = time.perf_counter()
            self._process.wake()
            seconds.append((asleep - start, time.perf_counter() - asleep))
        slowest = torch.tensor(seconds).median(dim=0).values
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        freeing, taking = slowest.tolist()
        return EngineSleep(freed_bytes_per_second=freed / freeing, taken_bytes_per_second=freed / taking)

    def _measure(self, point: Point) -> Measurement:
        if point.timed_pass is TimedPass.PREFILL:
            lengths = row_lengths(point.rows, point.tokens)
            return record(point, self._time(lambda: self._finish(self._requests(lengths, max_tokens=1))))
        half_range = point.context * (point.rows - 1) // point.rows
        shortest = point.context - half_range - _STEPS_BEFORE_MEAN
        lengths = [max(1, shortest + (2 * row + 1) * half_range // point.rows) for row in range(point.rows)]
        requests = self._requests(lengths, max_tokens=_MAX_STEPS)
        live = {request.id for request in requests}

        def step() -> None:
            live.difference_update(row.id for row in self._process.step() if row.has_ended)

        self._start(requests)
        sample = self._time(step)
        self._process.step(aborted=sorted(live))
        return record(point, sample)

    def _time(self, call: Callable[[], object]) -> TimingResult:
        """Return the times of a call, merged over all ranks, which call at once. Collective."""
        timer, longest = clock_timer(time.perf_counter, lambda: None), torch.zeros(1)
        dist.barrier()
        longest += timer(call)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        sample = measure(
            call,
            timer=timer,
            clock=time.perf_counter,
            warmup=0,
            repeats=max(_REPEATS, math.ceil(_MIN_SECONDS / float(longest))),  # the same on ranks that share a model
            budget_seconds=float("inf"),
        )
        return merge_ranks(sample)

    def _requests(self, lengths: Sequence[int], *, max_tokens: int) -> list[Request]:
        """Return requests for prompts of random tokens, none of which is cached."""
        numbers = [next(self._ids) for _ in lengths]
        return [
            Request(
                id=str(number),
                tokens=tuple(self._rng.integers(self._spec.vocab_size, size=length).tolist()),
                sampling=RequestSampling(
                    is_greedy=False,
                    top_k=self._engine.top_k,
                    top_p=self._engine.top_p,
                    seed=number,
                    max_tokens=max_tokens,
                    end_tokens=(),
                ),
            )
            for number, length in zip(numbers, lengths, strict=True)
        ]

    def _finish(self, requests: Sequence[Request]) -> None:
        """Run rounds until requests of one token have ended."""
        num_left = len(requests) - len(self._process.step(requests))
        while num_left:
            num_left -= len(self._process.step())

    def _start(self, requests: Sequence[Request]) -> None:
        """Run rounds until every request has a token."""
        waiting = {request.id for request in requests}
        waiting -= {row.id for row in self._process.step(requests)}
        while waiting:
            waiting -= {row.id for row in self._process.step()}

    def _settings(self, facts: Facts, points: Sequence[Point], shard: EngineShard) -> EngineSettings:
        spec, decodes = self._spec, [point for point in points if point.timed_pass is TimedPass.DECODE]
        max_tokens = max([facts.workload.max_tokens, *(2 * point.context for point in decodes)]) + _MAX_STEPS
        num_blocks = max(
            [
                num_blocks_for(max_tokens),
                *(point.rows * num_blocks_for(point.context + point.tokens + _MAX_STEPS) for point in points),
            ]
        )
        token_bytes = cached_token_bytes(spec, shard.tp, self._dtype)
        return EngineSettings(
            model=str(self._engine.model),
            config={"num_hidden_layers": spec.num_layers, "max_position_embeddings": max_tokens},
            dtype=str(self._dtype).removeprefix("torch."),
            max_tokens=max_tokens,
            num_slots=max([1, *(point.rows for point in points)]),
            max_round_tokens=max([max_tokens, *((point.rows + 1) * point.tokens for point in points)]),
            block_tokens=BLOCK_TOKENS,
            cache_bytes=(2 * num_blocks + 1) * BLOCK_TOKENS * token_bytes,  # one is vLLM's own
            temperature=1.0,
            shard=shard,
            adapter=engine_adapter(spec),
        )
