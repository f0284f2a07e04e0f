"""Timing of one point of the profiling grid on all ranks at once. Each rank runs its own model, which has the shapes of
one shard, so that no pass communicates.

A failure on any rank fails the point on all of them, so that the ranks stay in step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.planner.job.algorithm_settings import PPO
from meshwright.profiles.harness import DeviceState, TimingResult, failed_measurement, measure, record
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.packing import num_blocks_for
from meshwright.profiles.table import Measurement, Point, TimedPass
from meshwright.runtime.device import host
from meshwright.runtime.device.instruments import Instruments, is_finite, why_failed
from meshwright.runtime.inference.engine import Generator
from meshwright.runtime.messages.experience import Experience
from meshwright.runtime.model.kernel_choice import PLAIN, ChosenKernels
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import Decoder, build_model
from meshwright.runtime.training.trainer import MicroBatch, Trainer, forward_logprobs, forward_scalars
from meshwright.runtime.training.training_batch import training_loss
from meshwright.runtime.training.weight_copies import DTYPES

T = TypeVar("T")

NOT_FINITE = "the output is not finite"

_STEPS_PER_POLL = 8
"""Decode steps between two synchronisations of a GPU with its host, as in runs where end tokens are not frequent."""


@dataclass(frozen=True, kw_only=True)
class _RankMeasurement:
    """The measurement of a point on one rank."""

    sample: TimingResult
    peak_bytes: int
    conditions: DeviceState


class Bench:
    """Measures points on one rank; it builds the model once for successive points of the same shape and depth."""

    def __init__(
        self,
        mesh: Mesh,
        instruments: Instruments,
        *,
        precision: str,
        max_positions: int,
        kernels: ChosenKernels = PLAIN,
    ) -> None:
        self._mesh, self._instruments, self._kernels = mesh, instruments, kernels
        self._precision, self._max_positions = precision, max_positions
        self._key: tuple[object, ...] = ()
        self.model: Decoder | None = None
        self._trainer: Trainer | None = None

    def measure_point(
        self, point: Point, *, repeats: int, budget_seconds: float, min_seconds: float = 0.0
    ) -> Measurement:
        """Measure a point on all ranks at once: the median time over ranks, and the most memory of any rank.

        A short pass runs more often than `repeats` times, for `min_seconds` on each rank.
        """
        began = time.perf_counter()
        timed_pass, reason = self._attempt(lambda: self.prepare(point))
        reason = _first_reason(reason)
        if reason is None:
            assert timed_pass is not None
            budget = budget_seconds - (time.perf_counter() - began)
            dist.barrier()
            run, reason = self._attempt(
                lambda: self._time(timed_pass, self._num_steps(point), repeats, budget, min_seconds)
            )
            reason = _first_reason(reason)
        if reason is not None:
            self._instruments.release()
            return failed_measurement(point, reason)
        return _merged(point, run)

    def _attempt(self, action: Callable[[], T]) -> tuple[T | None, str | None]:
        """Return the action's result, or the reason why the device could not run it."""
        try:
            return action(), None
        except Exception as error:
            reason = why_failed(error)
            if reason is None:
                raise
            return None, reason

    def prepare(self, point: Point) -> Callable[[], object]:
        """Return the point's timed pass, warmed up once. Raises FloatingPointError if its output is not finite."""
        timed_pass = self._timed_pass(point)
        if not is_finite(timed_pass()):
            raise FloatingPointError(NOT_FINITE)
        return timed_pass

    def _num_steps(self, point: Point) -> int:
        """Return the number of decode steps in one timed call, several on a GPU; 1 for other passes."""
        return _STEPS_PER_POLL if point.timed_pass is TimedPass.DECODE and host.on_cuda() else 1

    def _time(
        self, timed_pass: Callable[[], object], num_steps: int, repeats: int, budget_seconds: float, min_seconds: float
    ) -> _RankMeasurement:
        instruments = self._instruments
        before = instruments.reset_peak()
        sample = measure(
            timed_pass,
            timer=lambda steps: instruments.timer(steps) / num_steps,
            clock=time.perf_counter,
            warmup=0,
            repeats=repeats,
            budget_seconds=budget_seconds,
            min_seconds=min_seconds,
        )
        return _RankMeasurement(
            sample=sample, peak_bytes=max(0, instruments.peak_bytes() - before), conditions=instruments.conditions()
        )

    def _timed_pass(self, point: Point) -> Callable[[], object]:
        spec = point.shape.model(num_layers=point.num_layers, max_positions=self._max_positions)
        model = self._build(spec, (point.shape, point.num_layers))
        if point.timed_pass is TimedPass.OPTIMIZER:
            return self._trainer_of(model).update
        if point.timed_pass is TimedPass.PREFILL:
            lengths = row_lengths(point.rows, point.tokens)
            return self._generator(model, spec, point.rows, max(lengths) + 1).prefill_pass(lengths)
        if point.timed_pass is TimedPass.DECODE:
            return self._decode_steps(model, spec, point.rows, point.context, self._num_steps(point))
        if point.timed_pass is TimedPass.TRAIN:
            trainer, micro_batch = self._trainer_of(model), _training_micro_batch(spec, point.rows, point.tokens)
            loss = training_loss(spec, self._mesh, PPO(), point.rows * point.tokens)
            return lambda: trainer.accumulate([micro_batch], loss)
        forward = forward_scalars if spec.scalar_head else forward_logprobs
        experience = _experience(spec, point.rows, point.tokens)
        return lambda: _forward_pass(forward, model, self._mesh, experience)

    def _build(self, spec: ModelSpec, key: tuple[object, ...]) -> Decoder:
        if key != self._key or self.model is None:
            self._key, self.model, self._trainer = (), None, None
            self._instruments.release()  # the old model's memory is free for the new one
            model = build_model(spec, self._mesh, dtype=DTYPES[self._precision], trainable=True, kernels=self._kernels)
            assert isinstance(model, Decoder)  # its mesh has one rank, so no pipeline
            self._key, self.model = key, model
        return self.model

    def _trainer_of(self, model: Decoder) -> Trainer:
        """Return the trainer, created at first use: gradients and moments take several times the weights."""
        if self._trainer is None:
            self._trainer = Trainer(model, self._mesh, learning_rate=1e-6, weight_decay=0.0, max_grad_norm=1.0)
        return self._trainer

    def _decode_steps(
        self, model: Decoder, spec: ModelSpec, rows: int, context: int, num_steps: int
    ) -> Callable[[], object]:
        """Return a function that runs `num_steps` decode steps, with `context` cached tokens per row on average.

        As in the middle of a run, cached lengths are spread evenly from few tokens to about twice the average. Each
        step adds a token to every row, and rows that reach the longest length start again at the shortest.
        """
        half_range = context * (rows - 1) // rows
        shortest, longest = context - half_range, context + half_range
        cached = [shortest + (2 * row + 1) * half_range // rows for row in range(rows)]
        num_blocks = rows * (num_blocks_for(context + num_steps) + 1) + num_blocks_for(longest + num_steps)
        generator = self._generator(model, spec, rows, longest + num_steps, num_blocks)
        return generator.decode_pass(cached, shortest, longest, num_steps)

    def _generator(
        self, model: Decoder, spec: ModelSpec, num_slots: int, max_tokens: int, num_blocks: int | None = None
    ) -> Generator:
        model.eval()
        return Generator(
            model,
            spec,
            self._mesh,
            num_slots=num_slots,
            num_blocks=num_blocks,
            max_tokens=max_tokens,
            max_response=1,  # so that prompts may have all other tokens, which sets the token limit of a prefill pass
            eos_tokens=frozenset(),
            temperature=1.0,
            seed=0,
        )


def _first_reason(local: str | None) -> str | None:
    """Return the failure reason of the first rank that has one, the same on every rank. Collective."""
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, local)
    return next((reason for reason in reasons if reason is not None), None)


def _merged(point: Point, local: _RankMeasurement | None) -> Measurement:
    """Return one measurement from those of all ranks; conditions are those of the hottest device. Collective."""
    gathered: list[_RankMeasurement | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, local)
    runs = [run for run in gathered if run is not None]
    hottest = max((run.conditions for run in runs), key=lambda conditions: conditions.celsius or 0)
    return record(point, _merged_samples([run.sample for run in runs]), max(run.peak_bytes for run in runs), hottest)


def is_over(end: float) -> bool:
    """Return rank 0's decision that the time is over, so that all ranks stop together. Collective."""
    decision = [time.monotonic() > end]
    dist.broadcast_object_list(decision)
    return decision[0]


def merge_ranks(sample: TimingResult) -> TimingResult:
    """Return one result from those of all ranks. Collective."""
    gathered: list[TimingResult | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, sample)
    return _merged_samples([one for one in gathered if one is not None])


def _merged_samples(samples: Sequence[TimingResult]) -> TimingResult:
    return TimingResult(
        median_seconds=statistics.median(sample.median_seconds for sample in samples),
        spread_seconds=max(sample.spread_seconds for sample in samples),
        repeats=min(sample.repeats for sample in samples),
    )


def row_lengths(rows: int, tokens: int) -> list[int]:
    """Return the tokens of each row, `tokens` on average.

    Neighbouring rows differ in length, as in a run: on a CPU, rows of equal length would share one attention call.
    """
    pairs = [tokens - 1, tokens + 1] * (rows // 2) if tokens > 1 else [tokens] * rows
    return pairs + [tokens] * (rows - len(pairs))


def _experience(spec: ModelSpec, rows: int, tokens: int) -> Experience:
    """Return experience with random sequences to score."""
    experience = Experience()
    for row, length in enumerate(row_lengths(rows, tokens)):
        experience.put("tokens", row, torch.randint(spec.vocab_size, (length,)))
    return experience


def _forward_pass(
    forward: Callable[[Decoder, Mesh, list[MicroBatch]], list[Tensor]],
    model: Decoder,
    mesh: Mesh,
    experience: Experience,
) -> list[Tensor]:
    """Run a forward pass over the sequences of the experience and put its outputs back, as a stage does."""
    rows = experience.rows("tokens")
    micro_batch = MicroBatch.pack(experience.get("tokens", row) for row in rows)
    outputs = forward(model, mesh, [micro_batch])
    for row, values in zip(rows, micro_batch.split_rows(outputs[0].cpu()), strict=True):
        experience.put("ref_logprobs", row, values.clone())
    return outputs


def _training_micro_batch(spec: ModelSpec, rows: int, tokens: int) -> MicroBatch:
    """Return a micro-batch with every field that the policy or value loss reads."""
    lengths = row_lengths(rows, tokens)
    zeros = [torch.zeros(length) for length in lengths]
    fields = dict.fromkeys(("old_logprobs", "advantages", "values", "returns"), zeros)
    masks = [torch.ones(length, dtype=torch.bool) for length in lengths]
    return MicroBatch.pack((torch.randint(spec.vocab_size, (length,)) for length in lengths), {**fields, "mask": masks})
