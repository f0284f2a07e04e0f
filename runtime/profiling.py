"""Times the runtime's own stage bodies and collectives on this machine, all ranks busy at once.

Each rank builds a shard as a model of its own, without tensor-parallel collectives; collectives are timed apart.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from meshwright.planner.job import PPO, Facts
from meshwright.profiles.harness import (
    Sample,
    exchanges,
    failure,
    measure,
    points,
    record,
    record_collective,
)
from meshwright.profiles.layout import Layout
from meshwright.profiles.model import ModelSpec
from meshwright.profiles.partial import PartialTable, begun, missing, partial_path
from meshwright.profiles.stages import Role
from meshwright.profiles.table import (
    Body,
    Collective,
    Exchange,
    Measurement,
    Point,
    Provenance,
    Table,
    write_table,
)
from meshwright.runtime import host, memory
from meshwright.runtime.bodies import MicroBatch, Trainer, forward_logprobs, forward_scalars
from meshwright.runtime.copies import DTYPES
from meshwright.runtime.generation import Generator
from meshwright.runtime.launch import launch
from meshwright.runtime.learning import training_loss
from meshwright.runtime.mesh import Mesh, build_mesh
from meshwright.runtime.models import Decoder, build_model
from meshwright.runtime.slots import LiveSequence, Prompt

_WARMUP = 1
_REPEATS = 5
_LIBRARIES = ("torch", "megatron-core", "numpy")


def profile_job(facts: Facts, output: Path, *, minutes: float, fresh: bool = False) -> Table:
    """Writes the table of the job's shapes on this machine, what it lacks being measured within about `minutes`.

    Raises BadInput when `output`, or what a call that was cut off left beside it, was measured with something else.
    """
    table, kept = begun(output, _provenance(facts), fresh=fresh), partial_path(output)
    wanted, between = _wanted(facts, table)
    if wanted or between:
        write_table(kept, table)
        num_ranks = facts.cluster.ranks_per_node
        table = launch(_measure_all, facts, table, kept.resolve(), minutes * 60, num_ranks=num_ranks)[0]
    write_table(output, table)
    kept.unlink(missing_ok=True)
    return table


def _provenance(facts: Facts) -> Provenance:
    return Provenance(
        device=facts.cluster.device.name,
        kind="cuda" if torch.cuda.is_available() else "cpu",
        precision=facts.precision,
        driver=_driver(),
        libraries={name: version(name) for name in _LIBRARIES},
        commit=_commit(),
        date=datetime.date.today().isoformat(),
        threads_per_rank=1,
        num_ranks=facts.cluster.ranks_per_node,
        repeats=_REPEATS,
    )


def _wanted(facts: Facts, table: Table) -> tuple[tuple[Point, ...], tuple[Exchange, ...]]:
    """The points and collectives of the job that the table lacks."""
    specs = {role: facts.models.spec(role) for role in Role}
    return missing(table, points(specs, facts.workload, facts.cluster)), missing(table, exchanges(facts.cluster))


def _measure_all(facts: Facts, table: Table, path: Path, seconds: float) -> Table:
    """What every rank runs; rank 0 shows the progress and keeps the table."""
    wanted, between = _wanted(facts, table)
    meshes = [build_mesh(Layout(), rank) for rank in range(dist.get_world_size())]
    bench = _Bench(facts, meshes[dist.get_rank()])
    growing = PartialTable(table, path if dist.get_rank() == 0 else None, clock=time.monotonic)
    deadline = time.monotonic() + seconds
    with _progress(len(wanted) + len(between)) as advance:
        for index, point in enumerate(wanted):
            share = max(0.0, deadline - time.monotonic()) / (len(wanted) - index)
            growing.add(bench.measure_point(point, share))
            advance()
        for exchange in between:
            growing.add(*_measure_exchange(exchange))
            advance()
    return growing.table()


class _Bench:
    """Builds the model of a point once for all points of its shape and depth."""

    def __init__(self, facts: Facts, mesh: Mesh) -> None:
        self._facts, self._mesh = facts, mesh
        self._key: tuple[object, ...] = ()
        self._model: Decoder
        self._trainer: Trainer

    def measure_point(self, point: Point, budget_seconds: float) -> Measurement:
        """The point's time while every rank runs it; the slowest rank's memory."""
        try:
            body = self._body(point)
            before = memory.reset_peak()
            sample = _together(body, repeats=_REPEATS, budget_seconds=budget_seconds)
        except torch.OutOfMemoryError as error:
            return failure(point, f"out of memory: {str(error).splitlines()[0]}")
        return record(point, sample, max(0, memory.peak_bytes() - before))

    def _body(self, point: Point) -> Callable[[], object]:
        spec = point.shape.model(num_layers=point.num_layers, max_positions=self._facts.workload.max_tokens)
        self._build(spec, (point.shape, point.num_layers))
        if point.body is Body.OPTIMIZER:
            return self._trainer.update
        if point.body is Body.PREFILL:
            return self._prefill(spec, point)
        if point.body is Body.DECODE:
            return self._decode(spec, point)
        block = _training_block(spec, point.rows, point.tokens)
        if point.body is Body.TRAIN:
            loss = training_loss(spec, self._mesh, PPO(), point.rows * point.tokens)
            return lambda: self._trainer.accumulate([block], loss)
        forward = forward_scalars if spec.scalar_head else forward_logprobs
        return lambda: forward(self._model, self._mesh, [block])

    def _build(self, spec: ModelSpec, key: tuple[object, ...]) -> None:
        if key == self._key:
            return
        dtype = DTYPES[self._facts.precision]
        self._model = build_model(spec, self._mesh, dtype=dtype, trainable=True)
        self._trainer = Trainer(self._model, self._mesh, learning_rate=1e-6, weight_decay=0.0, max_grad_norm=1.0)
        self._key = key

    def _prefill(self, spec: ModelSpec, point: Point) -> Callable[[], object]:
        generator = self._generator(spec, point.rows, point.tokens + 1)
        live = [_sequence(row, point.tokens, drawn=False) for row in range(point.rows)]
        return lambda: generator.prefill(0, live)

    def _decode(self, spec: ModelSpec, point: Point) -> Callable[[], object]:
        generator = self._generator(spec, point.rows, point.context + 1)
        live = [_sequence(row, point.context, drawn=True) for row in range(point.rows)]
        return lambda: generator.decode(0, live)

    def _generator(self, spec: ModelSpec, num_slots: int, max_tokens: int) -> Generator:
        self._model.eval()
        return Generator(
            self._model,
            spec,
            self._mesh,
            num_slots=num_slots,
            max_tokens=max_tokens,
            max_response=max_tokens,
            eos_token=-1,
            temperature=1.0,
            seed=0,
        )


def _measure_exchange(exchange: Exchange) -> list[Collective]:
    """The collective's time among the first ranks of the world; the ranks outside it wait and have nothing."""
    group = dist.new_group(list(range(exchange.num_ranks)))
    sample = None
    if dist.get_rank() < exchange.num_ranks:
        body = _exchange_body(exchange, group)
        # Every rank must call equally often, so no budget may cut the repeats short.
        sample = measure(
            body,
            clock=time.perf_counter,
            synchronise=host.synchronise,
            warmup=_WARMUP,
            repeats=_REPEATS,
            budget_seconds=float("inf"),
        )
    dist.barrier()
    return [record_collective(exchange, sample)] if sample else []


def _exchange_body(exchange: Exchange, group: dist.ProcessGroup | None) -> Callable[[], object]:
    size = max(exchange.num_ranks, exchange.num_bytes // 4)
    whole = torch.ones(size - size % exchange.num_ranks, device=host.device())
    part = torch.ones(len(whole) // exchange.num_ranks, device=host.device())
    match exchange.operation:
        case "all_reduce":
            return lambda: dist.all_reduce(whole, group=group)
        case "all_gather":
            return lambda: dist.all_gather_into_tensor(whole, part, group=group)
        case "reduce_scatter":
            return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
        case "send_receive":
            return lambda: _send_receive(whole)


def _send_receive(message: Tensor) -> None:
    """One message from rank 0 to rank 1, and a byte back that says it has arrived."""
    receipt = torch.zeros(1, dtype=torch.uint8, device=message.device)
    if dist.get_rank() == 0:
        dist.send(message, 1)
        dist.recv(receipt, 1)
    else:
        dist.recv(message, 0)
        dist.send(receipt, 0)


def _together(body: Callable[[], object], *, repeats: int, budget_seconds: float) -> Sample:
    """The median over ranks of each rank's median, all ranks working at once."""
    dist.barrier()
    mine = measure(
        body,
        clock=time.perf_counter,
        synchronise=host.synchronise,
        warmup=_WARMUP,
        repeats=repeats,
        budget_seconds=budget_seconds,
    )
    samples: list[Sample] = [mine] * dist.get_world_size()
    dist.all_gather_object(samples, mine)
    return Sample(
        median_seconds=statistics.median(sample.median_seconds for sample in samples),
        spread_seconds=max(sample.spread_seconds for sample in samples),
        repeats=min(sample.repeats for sample in samples),
    )


def _sequence(row: int, num_tokens: int, *, drawn: bool) -> LiveSequence:
    """A sequence with `num_tokens` in its prompt, and one drawn token that is not cached yet if `drawn`."""
    sequence = LiveSequence(prompt=Prompt(row=row, draw=row, tokens=(1,) * num_tokens))
    return LiveSequence(prompt=sequence.prompt, tokens=[1], logprobs=[0.0]) if drawn else sequence


def _training_block(spec: ModelSpec, rows: int, tokens: int) -> MicroBatch:
    """A micro-batch with everything that either loss reads."""
    fields = dict.fromkeys(("old_logprobs", "advantages", "values", "returns"), torch.zeros(rows, tokens))
    mask = torch.ones(rows, tokens, dtype=torch.bool)
    return MicroBatch(tokens=torch.randint(spec.vocab_size, (rows, tokens)), fields={**fields, "mask": mask})


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on rank 0, silence elsewhere."""
    if dist.get_rank() != 0:
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task("measuring", total=total)
        yield lambda: progress.advance(task)


def _driver() -> str:
    if torch.cuda.is_available():
        return f"CUDA {torch.version.cuda}"
    return f"{platform.system()} {platform.release()}"


def _commit() -> str:
    """The last commit that changed the bodies' folder, or the package version where there is no repository."""
    here = os.path.dirname(os.path.realpath(__file__))
    found = subprocess.run(
        ["git", "log", "-1", "--format=%H", "--", "."], cwd=here, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or f"meshwright {version('meshwright')}"
