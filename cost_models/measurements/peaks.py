"""Memory that bodies were measured to use while they ran, in place of what is counted for activations and logits.

Counting cannot know what an unfused kernel or an allocator keeps besides. Weights, optimizer, caches and refits are
counted all the same; so are stages that no body of the table runs as they do: full recomputation, chunks, and parts of
sequences.
"""

from __future__ import annotations

import math
from dataclasses import replace

from meshwright.cost_models.cost import Cost, Memory, Source, Term
from meshwright.cost_models.measurements.measured import splits, surfaces
from meshwright.cost_models.params import micro_batches_in_flight
from meshwright.cost_models.question import Call
from meshwright.profiles.layout import layers_of_stages
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Recompute
from meshwright.profiles.table import Body, Table, shape_of
from meshwright.profiles.workload import Workload

_COUNTED = ("activations", "working set", "logits")
_REFIT = "refit buffer"

MEASURED = "working memory"


class Peaks:
    """Bytes beyond what was in use before, by body, rows and tokens, of one shard of `model`."""

    def __init__(self, table: Table, model: ModelSpec, tp: int) -> None:
        found = splits(table, shape_of(model, tp), lambda measurement: measurement.peak_bytes)
        self._surfaces = {body: surfaces(parts) for body, parts in found.items()}

    def at(self, body: Body, rows: float, tokens: float, num_layers: float) -> tuple[float, Source] | None:
        """The bytes that `num_layers` layers with embedding and head use; None where they were not measured."""
        if body not in self._surfaces:
            return None
        layers, ends = self._surfaces[body]
        layer, source = layers.at(rows, tokens)
        return num_layers * layer + ends.at(rows, tokens)[0], source


def with_peaks(counted: Memory, call: Call, workload: Workload, peaks: Peaks) -> Memory:
    """The memory of a forward or a training stage with its measured working memory; as it was where there is none."""
    stage, schedule, layout = call.stage, call.schedule, call.layout
    if stage.generates or schedule.chunk_tokens or schedule.recompute is Recompute.FULL or layout.sp or layout.cp > 1:
        return counted
    longest = workload.max_tokens
    most_rows = schedule.most_tokens(longest) / longest
    num_batches = math.ceil(_rows(call, workload) / most_rows)
    in_flight = micro_batches_in_flight(layout, layout.pp, num_batches) if stage.trains else 1
    body = Body.TRAIN if stage.trains else Body.FORWARD
    num_layers = in_flight * max(layers_of_stages(call.model, layout.pp))
    found = peaks.at(body, most_rows, longest, num_layers)
    terms = counted.transient.terms
    if found is None or not found[0]:
        return counted
    refit = counted.transient.amount(_REFIT)
    if refit > found[0]:
        return counted
    kept = tuple(term for term in terms if term.name not in (*_COUNTED, _REFIT))
    return replace(counted, transient=Cost((*kept, Term(MEASURED, *found))))


def _rows(call: Call, workload: Workload) -> int:
    """Of one replica in one update."""
    return -(-workload.batch_size // (workload.num_minibatches * call.layout.dp))
