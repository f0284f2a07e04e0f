"""Profile tables: measured times under one provenance, keyed by shapes and never by a model's name.

A tensor-parallel shard is timed on one device without its collectives, and its key is the shape of
`ModelSpec.shard(tp)`; so one device can profile a plan for many. Collectives are measured separately, by bytes and
group size. While a job is profiled, a partial table is written beside the final one, so that profiling can be
interrupted and resumed. This file defines and validates tables; cost models interpolate in them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from meshwright.profiles.documents import Document, VersionedDocument, canonical_json, read_json, write_atomically
from meshwright.profiles.elementwise import N
from meshwright.profiles.environment.latency import TimedCalls
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import EngineName, EngineSleep, own_engine
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.model_parts.adapter import Adapter
from meshwright.profiles.model_shape import ModelSpec


class TimedPass(StrEnum):
    """The timed passes; the docstring of `profiles/harness.py` says what each contains."""

    FORWARD = "forward"
    TRAIN = "train"
    PREFILL = "prefill"
    DECODE = "decode"
    OPTIMIZER = "optimizer"


class Shape(Document):
    """The sizes of a tensor-parallel shard that determine its time, except the number of layers."""

    hidden_size: int = Field(gt=0)
    ffn_size: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    vocab_rows: int = Field(gt=0, description="rows of the embedding on this shard")
    scalar_head: bool = Field(description="one number per token instead of a vocabulary")
    tied_embeddings: bool = Field(description="the head shares the rows of the embedding")
    qkv_bias: bool = False
    qk_norm: bool = False
    gated_mlp: bool = True
    adapter: Adapter | None = None

    def model(self, *, num_layers: int, max_positions: int) -> ModelSpec:
        """Return a model of this shape, to be built and timed."""
        return ModelSpec(
            name="shard",
            architecture="LlamaForCausalLM",
            num_layers=num_layers,
            hidden_size=self.hidden_size,
            ffn_size=self.ffn_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_rows,
            vocab_multiple=1,
            max_positions=max_positions,
            tied_embeddings=self.tied_embeddings,
            activation="silu",
            norm_epsilon=1e-6,
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            gated_mlp=self.gated_mlp,
            scalar_head=self.scalar_head,
            adapter=self.adapter,
        )


def shape_of(model: ModelSpec, tp: int) -> Shape:
    """Return the shape of one of `tp` shards of the model.

    Raises BadInput for a model with experts, sliding windows or other parts that a table does not hold.
    """
    if model.experts:
        raise BadInput(f"model {model.name} has experts, and tables hold dense shapes; plan it without a table.")
    if model.window:
        raise BadInput(
            f"model {model.name} has sliding windows, and tables hold attention to all tokens; plan it without a table."
        )
    if model.layer_kinds or model.latent or model.whole_qk_norm or model.attention_gate or model.norms != "before":
        raise BadInput(f"model {model.name} has layers of a shape that tables do not hold; plan it without a table.")
    shard = model.shard(tp)
    return Shape(
        hidden_size=shard.hidden_size,
        ffn_size=shard.ffn_size,
        num_heads=shard.num_heads,
        num_kv_heads=shard.num_kv_heads,
        head_dim=shard.head_dim,
        vocab_rows=shard.padded_vocab_size,
        scalar_head=shard.scalar_head,
        tied_embeddings=shard.tied_embeddings and not shard.scalar_head,
        qkv_bias=shard.qkv_bias,
        qk_norm=shard.qk_norm,
        gated_mlp=shard.gated_mlp,
        adapter=shard.adapter,
    )


class Point(Document):
    """The key of one measurement. Rows, tokens and context are 0 for an optimizer step."""

    shape: Shape
    num_layers: int = Field(gt=0)
    timed_pass: TimedPass
    rows: int = Field(ge=0)
    tokens: int = Field(ge=0, description="new tokens per row")
    context: int = Field(ge=0, description="tokens per row that are cached already")


class Exchange(Document):
    """The key of one collective among consecutive ranks of one node.

    `num_bytes` is the size of the whole tensor: the input of each rank for all-reduce and reduce-scatter, the output of
    each rank for all-gather, the message for send-receive.
    """

    operation: Literal["all_reduce", "all_gather", "reduce_scatter", "send_receive"]
    num_ranks: int = Field(ge=2)
    num_bytes: int = Field(gt=0)


class Timing(Document):
    """A median with its spread, or a recorded failure."""

    status: Literal["ok", "failed"] = "ok"
    seconds: float | None = Field(default=None, ge=0, description="median")
    spread_seconds: float | None = Field(default=None, ge=0, description="interquartile range")
    repeats: int = Field(default=0, ge=0)
    peak_bytes: int | None = Field(default=None, ge=0, description="peak memory in use while it ran, minus that before")
    clock_mhz: int | None = Field(default=None, gt=0, description="clock of the device afterwards; null is unknown")
    celsius: int | None = Field(default=None, description="temperature of the device afterwards; null is unknown")
    reason: str | None = Field(default=None, description="why it failed")

    @model_validator(mode="after")
    def _require_consistent(self) -> Timing:
        if self.status == "ok" and (self.seconds is None or self.spread_seconds is None or self.repeats < 1):
            raise ValueError("a measurement that is ok needs seconds, spread_seconds and repeats of 1 or more")
        if self.status == "failed" and (not self.reason or self.seconds is not None):
            raise ValueError("a failed measurement needs a reason and has no seconds")
        return self


class Measurement(Timing):
    """The time of one pass on one shard."""

    point: Point


class Collective(Timing):
    """The time of one collective."""

    exchange: Exchange


class WeightLoad(Timing):
    """The time in which an engine in its own process takes new weights from the rank beside it."""

    shape: Shape
    num_layers: int = Field(gt=0)


class EngineTimings(Document):
    """Times of a generation engine that runs in a process beside the rank, as a run uses it.

    A prefill is a round in which prompts are admitted, a decode step one in which none is; both include the messages
    between the rank and the engine, and all that the host does for a round.
    """

    engine: EngineName
    version: str = Field(min_length=1)
    kernels: str = Field(min_length=1)
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")
    measurements: tuple[Measurement, ...] = ()
    loads: tuple[WeightLoad, ...] = Field(default=(), description="new weights, at each number of layers")
    process_bytes: float | None = Field(
        default=None, gt=0, description="memory of the process beside its weights and KV cache"
    )
    sleep: EngineSleep | None = Field(default=None, description="how fast it frees its KV cache and takes it again")

    def has_rounds_of(self, shape: Shape) -> bool:
        """Return True if decode steps of this shape were timed at two numbers of layers."""
        depths = {
            one.point.num_layers
            for one in self.measurements
            if one.status == "ok" and one.point.shape == shape and one.point.timed_pass is TimedPass.DECODE
        }
        return len(depths) > 1

    def load_seconds(self, shape: Shape, num_layers: int) -> float | None:
        """Return the seconds of a load of all weights; None if it was not measured at two numbers of layers."""
        known = {one.num_layers: one.seconds for one in self.loads if one.shape == shape and one.seconds is not None}
        if num_layers in known:
            return known[num_layers]
        if len(known) < 2:
            return None
        low, high = min(known), max(known)
        return max(0.0, known[low] + (known[high] - known[low]) / (high - low) * (num_layers - low))


class Provenance(Document):
    """Hardware, software versions, commit, date and settings with which a table was measured."""

    device: str = Field(min_length=1, description="name of the device, as the cluster spells it")
    kind: Literal["cpu", "cuda"]
    precision: Literal["fp32", "bf16"]
    driver: str = Field(min_length=1, description="driver, or operating system for a CPU")
    libraries: dict[str, str] = Field(min_length=1, description="version of each library that the timed code uses")
    commit: str = Field(min_length=1, description="commit of the code that was timed")
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")
    threads_per_rank: int = Field(gt=0)
    num_ranks: int = Field(gt=0, description="ranks that ran at once and competed for the machine")
    repeats: int = Field(gt=0, description="requested repeats of each measurement")
    origin: str | None = Field(
        default=None, description="source of the measurements, for a table built from imported operators"
    )
    kernels: str | None = Field(default=None, description="kernels that the timed code used; null is unknown")

    @property
    def engine(self) -> EngineName:
        """The engine whose prefills and decode steps were timed: the one that `run` uses on such a device."""
        return own_engine(self.kind, has_experts=False)


class Correction(Document):
    """A calibration from a run: the seconds of one pass on one shape are those of the table times `factor`."""

    shape: Shape
    timed_pass: TimedPass
    factor: float = Field(gt=0, description="corrected seconds over those without this correction")
    spread: float = Field(ge=0, description="interquartile range over steps of the measured seconds, over their median")
    stages: tuple[str, ...] = Field(min_length=1, description="stages of the run that it was derived from")
    plan: str = Field(min_length=1, description="SHA-256 of the plan that ran")
    num_steps: int = Field(gt=0, description="steps that were measured, the first of the run left out")
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$", description="day of the calibration")
    engine: EngineName | None = Field(
        default=None, description="the engine in its own process that ran these passes; not given for all other passes"
    )


class Traffic(StrEnum):
    """Kinds of communication between ranks whose times are calibrated."""

    COLLECTIVE = "collective"
    REFIT = "refit"
    TRANSFER = "transfer"


class TrafficCorrection(Document):
    """A calibration from a run: a transfer of this kind takes `factor` x predicted seconds + `seconds`."""

    traffic: Traffic
    factor: float = Field(default=1.0, gt=0)
    seconds: float = Field(default=0.0, ge=0)
    plan: str = Field(min_length=1, description="SHA-256 of the plan that ran")
    num_steps: int = Field(gt=0, description="steps that were measured, the first of the run left out")
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$", description="day of the calibration")


class Table(VersionedDocument):
    """Measurements under one provenance, in canonical order.

    Corrections do not change the measurements. They are applied one after another, the latest last.
    """

    remedy: ClassVar[str] = "measure it again with `meshwright profile`"

    provenance: Provenance
    measurements: tuple[Measurement, ...] = ()
    collectives: tuple[Collective, ...] = ()
    corrections: tuple[Correction, ...] = ()
    traffic: tuple[TrafficCorrection, ...] = Field(default=(), description="corrections of communication between ranks")
    calls: tuple[TimedCalls, ...] = Field(default=(), description="timed calls of rewards and tools on hosts")
    engines: tuple[EngineTimings, ...] | None = Field(
        default=None, min_length=1, description="times of engines that run in processes of their own"
    )

    @field_validator("engines")
    @classmethod
    def _unique_engines(cls, engines: tuple[EngineTimings, ...] | None) -> tuple[EngineTimings, ...] | None:
        if engines and len({one.engine for one in engines}) < len(engines):
            raise ValueError("an engine is listed twice; keep one of the two")
        return engines

    @field_validator("calls")
    @classmethod
    def _unique_calls(cls, calls: tuple[TimedCalls, ...]) -> tuple[TimedCalls, ...]:
        if len({one.called for one in calls}) < len(calls):
            raise ValueError("the calls of a function or judge are listed twice; keep one of the two")
        return tuple(sorted(calls, key=lambda one: one.called.model_dump_json()))

    @field_validator("measurements")
    @classmethod
    def _unique_measurements(cls, measurements: tuple[Measurement, ...]) -> tuple[Measurement, ...]:
        if len({m.point for m in measurements}) < len(measurements):
            raise ValueError("a point is measured twice; keep one of the two")
        return tuple(sorted(measurements, key=lambda m: m.point.model_dump_json()))

    @field_validator("collectives")
    @classmethod
    def _unique_collectives(cls, collectives: tuple[Collective, ...]) -> tuple[Collective, ...]:
        if len({c.exchange for c in collectives}) < len(collectives):
            raise ValueError("a collective is measured twice; keep one of the two")
        return tuple(
            sorted(collectives, key=lambda c: (c.exchange.operation, c.exchange.num_ranks, c.exchange.num_bytes))
        )

    @property
    def spread(self) -> float:
        """The median over all measurements of interquartile range / median; 0 without measurements."""
        return statistics.median(
            [m.spread_seconds / m.seconds for m in self.measurements if m.seconds and m.spread_seconds is not None]
            or [0.0]
        )

    def factors(self, shape: Shape, engine: EngineName | None = None) -> dict[TimedPass, float]:
        """The product of all corrections of each pass on this shape; passes without a correction are left out.

        `engine` is the engine in its own process that runs the passes, if one does.
        """
        corrections = [c for c in self.corrections if c.shape == shape and c.engine == engine]
        return {
            timed_pass: math.prod(c.factor for c in corrections if c.timed_pass == timed_pass)
            for timed_pass in {c.timed_pass for c in corrections}
        }

    def corrected(self, traffic: Traffic, seconds: N) -> N:
        """Apply all corrections for this kind of traffic to the seconds of one transfer, or of several."""
        for correction in self.traffic:
            if correction.traffic is traffic:
                seconds = seconds * correction.factor + correction.seconds
        return seconds

    def has_correction(self, traffic: Traffic) -> bool:
        """True if some correction changes the seconds of this kind of traffic."""
        return any(c.traffic is traffic and (c.factor != 1 or c.seconds) for c in self.traffic)

    def with_calls(self, new_calls: Iterable[TimedCalls]) -> Table:
        """Return the table with these timed calls added; they replace calls with the same key."""
        calls = {one.called: one for one in (*self.calls, *new_calls)}
        return Table.model_validate({**dict(self), "calls": tuple(calls.values())})

    def timings_of(self, engine: EngineName | None) -> EngineTimings | None:
        """Return the times of an engine that runs in its own process; None if it was not measured."""
        return next((one for one in self.engines or () if one.engine == engine), None)

    def with_timings(self, timings: EngineTimings) -> Table:
        """Return the table with the times of an engine; they replace earlier ones."""
        others = tuple(one for one in self.engines or () if one.engine != timings.engine)
        return Table.model_validate({**dict(self), "engines": (*others, timings)})

    def require(self, cluster: Cluster, precision: str) -> None:
        """Raises BadInput if the table was measured on another device or in another precision."""
        device = cluster.device.name
        if self.provenance.device != device:
            raise BadInput(
                f"the table was measured on {self.provenance.device!r} and the cluster has {device!r}; "
                "profile that device, or plan without a table."
            )
        if self.provenance.precision != precision:
            raise BadInput(
                f"the table was measured in {self.provenance.precision} and the job runs in {precision}; profile again."
            )


def read_table(path: Path) -> Table:
    """Read a table from a JSON file. Raises BadInput for a missing file or an invalid table."""
    return read_json(Table, path, "table")


def write_table(path: Path, table: Table) -> None:
    """Write the table as canonical JSON."""
    write_atomically(path, canonical_json(table))


K = TypeVar("K", Point, Exchange)

_SECONDS_BETWEEN_WRITES = 2.0
"""Upper bound on the seconds of measurements lost on interruption; a write takes some 10 ms."""


def partial_path(output: Path) -> Path:
    """Return the path of the partial table of `output`."""
    return output.with_name(f"{output.stem}.partial{output.suffix}")


def resume_table(output: Path, provenance: Provenance, *, fresh: bool) -> Table:
    """Return the table that earlier calls of `profile` measured for `output`, partial or complete.

    It is empty if there is none, or with `fresh`. The date remains that of the first call. Raises BadInput if the
    provenance of that table differs otherwise.
    """
    if not fresh:
        for path in (partial_path(output), output):
            if path.exists():
                table = read_table(path)
                _require_same(path, table.provenance, provenance)
                return table
    return Table(provenance=provenance)


def missing_keys(table: Table, keys: Iterable[K]) -> tuple[K, ...]:
    """Return the keys for which the table has neither a time nor a failure, in order."""
    known = {*(m.point for m in table.measurements), *(c.exchange for c in table.collectives)}
    return tuple(key for key in keys if key not in known)


class PartialTable:
    """A table that is filled and written periodically; without a path it is not written. `clock` is in seconds."""

    def __init__(self, table: Table, path: Path | None, *, clock: Callable[[], float]) -> None:
        self._initial, self._path, self._clock = table, path, clock
        self._measurements = {one.point: one for one in table.measurements}
        self._collectives = {one.exchange: one for one in table.collectives}
        self._written_at = clock()

    def add(self, *measurements: Measurement | Collective) -> None:
        """Add or replace measurements, and write the table if the last write is long enough ago."""
        self._measurements |= {one.point: one for one in measurements if isinstance(one, Measurement)}
        self._collectives |= {one.exchange: one for one in measurements if isinstance(one, Collective)}
        if self._path and self._clock() - self._written_at >= _SECONDS_BETWEEN_WRITES:
            write_table(self._path, self.table())
            self._written_at = self._clock()

    def table(self) -> Table:
        """Return the table with all measurements so far."""
        update = {
            "measurements": tuple(self._measurements.values()),
            "collectives": tuple(self._collectives.values()),
        }
        return Table.model_validate({**dict(self._initial), **update})


def _require_same(path: Path, recorded: Provenance, current: Provenance) -> None:
    for name, value in current:
        measured = getattr(recorded, name)
        if name != "date" and measured != value:
            raise BadInput(
                f"{path} was measured with {name} {_text(measured)} and this call has {_text(value)}; "
                "name another output, or start over with --fresh."
            )


def _text(value: object) -> str:
    if value is None:
        return "that were not recorded"
    return ", ".join(f"{k} {v}" for k, v in sorted(value.items())) if isinstance(value, dict) else str(value)
