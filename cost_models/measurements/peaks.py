"""Measured peak memory of forward and training passes, used instead of the computed activations and logits.

Equations cannot know what an unfused kernel or an allocator keeps in addition. Weights, optimizer state, caches and
refit buffers are still computed, and so is everything for stages that run differently from the measured passes: full
recomputation, streaming, sequence and context parallelism.
"""

from __future__ import annotations

import math
from dataclasses import replace

from meshwright.cost_models.cost import Cost, Memory, Source, Term
from meshwright.cost_models.measurements.measured import split_by_depth, surfaces
from meshwright.cost_models.params import micro_batches_in_flight
from meshwright.cost_models.question import Call
from meshwright.profiles.layout import layers_per_stage
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Recompute
from meshwright.profiles.table import Table, TimedPass, shape_of
from meshwright.profiles.workload import Workload

_COUNTED = ("activations", "working set", "logits")
_REFIT = "refit buffer"

MEASURED = "working memory"


class Peaks:
    """Bytes that a pass of one shard of `model` allocates at its peak, by kind of pass, rows and tokens."""

    def __init__(self, table: Table, model: ModelSpec, tp: int) -> None:
        parts_by_body = split_by_depth(table, shape_of(model, tp), lambda measurement: measurement.peak_bytes)
        self._surfaces = {body: surfaces(parts) for body, parts in parts_by_body.items()}

    def at(self, body: TimedPass, rows: float, tokens: float, num_layers: float) -> tuple[float, Source] | None:
        """Return the peak bytes of `num_layers` layers with embedding and head; None if they were not measured."""
        if body not in self._surfaces:
            return None
        layers, ends = self._surfaces[body]
        layer, source = layers.at(rows, tokens)
        return num_layers * layer + ends.at(rows, tokens)[0], source


def with_peaks(counted: Memory, call: Call, workload: Workload, peaks: Peaks) -> Memory:
    """Return the memory of a stage with its measured working memory; unchanged if there is none."""
    stage, schedule, layout = call.stage, call.schedule, call.layout
    if stage.generates or schedule.chunk_tokens or schedule.recompute is Recompute.FULL or layout.sp or layout.cp > 1:
        return counted
    longest = workload.max_tokens
    max_rows = schedule.max_tokens(longest) / longest
    num_batches = math.ceil(_rows(call, workload) / max_rows)
    in_flight = micro_batches_in_flight(layout, layout.pp, num_batches) if stage.trains else 1
    body = TimedPass.TRAIN if stage.trains else TimedPass.FORWARD
    num_layers = in_flight * max(layers_per_stage(call.model, layout.pp))
    measured = peaks.at(body, max_rows, longest, num_layers)
    terms = counted.transient.terms
    if measured is None or not measured[0]:
        return counted
    refit = counted.transient.amount(_REFIT)
    if refit > measured[0]:
        return counted
    other_terms = tuple(term for term in terms if term.name not in (*_COUNTED, _REFIT))
    return replace(counted, transient=Cost((*other_terms, Term(MEASURED, *measured))))


def _rows(call: Call, workload: Workload) -> int:
    """Return the rows of one replica in one update."""
    return -(-workload.batch_size // (workload.num_minibatches * call.layout.dp))
