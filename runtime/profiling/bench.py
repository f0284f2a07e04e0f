"""Runs one point of the grid on every rank at once: builds the shard as a model of its own, and times its body.

A failure on any rank is a failure of the point on all of them, so that the ranks stay in step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.planner.plan.ppo_settings import PPO
from meshwright.profiles.harness import Conditions, Sample, failure, measure, record
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.packing import blocks_of
from meshwright.profiles.table import Body, Measurement, Point
from meshwright.runtime.device import host
from meshwright.runtime.device.instruments import Instruments, is_finite, why_failed
from meshwright.runtime.generation.engine import Generator
from meshwright.runtime.messages.experience import Experience
from meshwright.runtime.model.chosen_kernels import PLAIN, ChosenKernels
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import Decoder, build_model
from meshwright.runtime.training.bodies import MicroBatch, Trainer, forward_logprobs, forward_scalars
from meshwright.runtime.training.copies import DTYPES
from meshwright.runtime.training.learning import training_loss

T = TypeVar("T")

NOT_FINITE = "the output is not finite"

_ROUNDS_AT_ONCE = 8
"""Decode steps between two looks of a GPU's host, as in runs where end tokens are not too frequent."""


@dataclass(frozen=True, kw_only=True)
class _Observed:
    """What one rank saw of a point."""

    sample: Sample
    peak_bytes: int
    conditions: Conditions


class Bench:
    """Builds the model of a point once for all points of its shape and depth."""

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
        self, point: Point, *, repeats: int, budget_seconds: float, least_seconds: float = 0.0
    ) -> Measurement:
        """The median over ranks of the point's time while every rank runs it, and the most memory of any rank.

        A short body runs more often than `repeats`, for `least_seconds` on each rank.
        """
        began = time.perf_counter()
        body, reason = self._attempt(lambda: self.ready(point))
        reason = _first(reason)
        if reason is None:
            assert body is not None
            left = budget_seconds - (time.perf_counter() - began)
            dist.barrier()
            run, reason = self._attempt(lambda: self._timed(body, self._rounds(point), repeats, left, least_seconds))
            reason = _first(reason)
        if reason is not None:
            self._instruments.release()
            return failure(point, reason)
        return _agreed(point, run)

    def _attempt(self, action: Callable[[], T]) -> tuple[T | None, str | None]:
        """What the action returned, or the reason why the device could not do it."""
        try:
            return action(), None
        except Exception as error:
            reason = why_failed(error)
            if reason is None:
                raise
            return None, reason

    def ready(self, point: Point) -> Callable[[], object]:
        """The point's body, warmed up once. Raises FloatingPointError for an output that is not finite."""
        body = self._body(point)
        if not is_finite(body()):
            raise FloatingPointError(NOT_FINITE)
        return body

    def _rounds(self, point: Point) -> int:
        """Of a point that the body has: a GPU looks at several decode steps together."""
        return _ROUNDS_AT_ONCE if point.body is Body.DECODE and host.on_cuda() else 1

    def _timed(
        self, body: Callable[[], object], rounds: int, repeats: int, budget_seconds: float, least_seconds: float
    ) -> _Observed:
        watch = self._instruments
        before = watch.reset_peak()
        sample = measure(
            body,
            timer=lambda body: watch.timer(body) / rounds,
            clock=time.perf_counter,
            warmup=0,
            repeats=repeats,
            budget_seconds=budget_seconds,
            least_seconds=least_seconds,
        )
        return _Observed(sample=sample, peak_bytes=max(0, watch.peak_bytes() - before), conditions=watch.conditions())

    def _body(self, point: Point) -> Callable[[], object]:
        spec = point.shape.model(num_layers=point.num_layers, max_positions=self._max_positions)
        model = self._build(spec, (point.shape, point.num_layers))
        if point.body is Body.OPTIMIZER:
            return self._trainer_of(model).update
        if point.body is Body.PREFILL:
            lengths = _lengths(point.rows, point.tokens)
            return self._generator(model, spec, point.rows, max(lengths) + 1).prefills(lengths)
        if point.body is Body.DECODE:
            return self._steps(model, spec, point.rows, point.context, self._rounds(point))
        if point.body is Body.TRAIN:
            trainer, block = self._trainer_of(model), _training_block(spec, point.rows, point.tokens)
            loss = training_loss(spec, self._mesh, PPO(), point.rows * point.tokens)
            return lambda: trainer.accumulate([block], loss)
        forward = forward_scalars if spec.scalar_head else forward_logprobs
        experience = _experience(spec, point.rows, point.tokens)
        return lambda: _scored(forward, model, self._mesh, experience)

    def _build(self, spec: ModelSpec, key: tuple[object, ...]) -> Decoder:
        if key != self._key or self.model is None:
            self._key, self.model, self._trainer = (), None, None
            self._instruments.release()  # the old model's memory is free for the new one
            model = build_model(spec, self._mesh, dtype=DTYPES[self._precision], trainable=True, kernels=self._kernels)
            assert isinstance(model, Decoder)  # the bench has one rank
            self._key, self.model = key, model
        return self.model

    def _trainer_of(self, model: Decoder) -> Trainer:
        """Made where it is first asked for: gradients and moments take several times the weights."""
        if self._trainer is None:
            self._trainer = Trainer(model, self._mesh, learning_rate=1e-6, weight_decay=0.0, max_grad_norm=1.0)
        return self._trainer

    def _steps(self, model: Decoder, spec: ModelSpec, rows: int, context: int, at_once: int) -> Callable[[], object]:
        """Decode steps of rows that have so many tokens cached on average, as in the middle of a run: they are spread
        evenly from few to twice as many, each goes on from step to step, and the longest make way for new ones. So many
        steps are done `at_once`."""
        apart = context * (rows - 1) // rows
        shortest, longest = context - apart, context + apart
        cached = [shortest + (2 * row + 1) * apart // rows for row in range(rows)]
        num_blocks = rows * (blocks_of(context + at_once) + 1) + blocks_of(longest + at_once)
        generator = self._generator(model, spec, rows, longest + at_once, num_blocks)
        return generator.steps(cached, shortest, longest, at_once)

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
            max_response=1,  # all other tokens may be of prompts, whose longest says how many one pass takes
            eos_tokens=frozenset(),
            temperature=1.0,
            seed=0,
        )


def _first(mine: str | None) -> str | None:
    """The reason of the first rank that has one; the same answer on every rank."""
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, mine)
    return next((reason for reason in reasons if reason is not None), None)


def _agreed(point: Point, mine: _Observed | None) -> Measurement:
    """One measurement from every rank's run; conditions are those of the hottest device."""
    gathered: list[_Observed | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    runs = [run for run in gathered if run is not None]
    samples = [run.sample for run in runs]
    sample = Sample(
        median_seconds=statistics.median(sample.median_seconds for sample in samples),
        spread_seconds=max(sample.spread_seconds for sample in samples),
        repeats=min(sample.repeats for sample in samples),
    )
    hottest = max((run.conditions for run in runs), key=lambda found: found.celsius or 0)
    return record(point, sample, max(run.peak_bytes for run in runs), hottest)


def _lengths(rows: int, tokens: int) -> list[int]:
    """Tokens of each row, on average those of the point. Neighbours differ, as they do in a run: equal ones would share
    a call of attention on a CPU."""
    apart = [tokens - 1, tokens + 1] * (rows // 2) if tokens > 1 else [tokens] * rows
    return apart + [tokens] * (rows - len(apart))


def _experience(spec: ModelSpec, rows: int, tokens: int) -> Experience:
    """Sequences to score."""
    experience = Experience()
    for row, length in enumerate(_lengths(rows, tokens)):
        experience.put("tokens", row, torch.randint(spec.vocab_size, (length,)))
    return experience


def _scored(
    forward: Callable[[Decoder, Mesh, list[MicroBatch]], list[Tensor]],
    model: Decoder,
    mesh: Mesh,
    experience: Experience,
) -> list[Tensor]:
    """A forward pass over the sequences, taken from the experience and put back there as a stage does."""
    rows = experience.rows("tokens")
    block = MicroBatch.of(experience.get("tokens", row) for row in rows)
    outputs = forward(model, mesh, [block])
    for row, values in zip(rows, block.of_rows(outputs[0].cpu()), strict=True):
        experience.put("ref_logprobs", row, values.clone())
    return outputs


def _training_block(spec: ModelSpec, rows: int, tokens: int) -> MicroBatch:
    """A micro-batch with everything that either loss reads."""
    lengths = _lengths(rows, tokens)
    zeros = [torch.zeros(length) for length in lengths]
    fields = dict.fromkeys(("old_logprobs", "advantages", "values", "returns"), zeros)
    masks = [torch.ones(length, dtype=torch.bool) for length in lengths]
    return MicroBatch.of((torch.randint(spec.vocab_size, (length,)) for length in lengths), {**fields, "mask": masks})
