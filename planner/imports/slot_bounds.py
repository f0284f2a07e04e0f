"""Upper bounds on the generation slots of an engine: its configured limit, and what fits into its KV cache.

A trainer gives its engine a limit of sequences (`max_num_seqs`) and a share of the memory for weights and cache
(`gpu_memory_utilization`). Neither is a number of slots: the engine runs as many sequences as fit, up to the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshwright.cost_models.question import Call, CostModel
from meshwright.planner.imports.said import MEMORY_SHARE, FieldValue, layout_of
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import Pin, parse_pin
from meshwright.planner.plan.rules import layout_rules, slot_counts
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import GENERATE


def slot_bounds(facts: Facts, model: CostModel, words: Mapping[str, FieldValue]) -> tuple[tuple[Pin, ...], list[str]]:
    """Pins that forbid the numbers of slots that a configuration does not admit, and sentences on them.

    A number of slots is admitted if it is within the configuration's limit and if weights, cache and working set take
    no more than the configured share of a device. The smallest number is always admitted.
    """
    layout = _layout(facts, words)
    if layout is None:
        return (), []
    counts = slot_counts(-(-facts.workload.batch_size // layout.dp), layout.pp)
    limit, share = int(words.get(f"{GENERATE}.generation_slots", counts[-1])), words.get(MEMORY_SHARE)
    admitted = [count for count in counts if count <= limit] or [counts[0]]
    if share is None:
        return tuple(_forbid_others(facts, counts, admitted)), []
    budget_bytes = float(share) * facts.cluster.parts[0].device.memory_bytes
    fitting = [count for count in admitted if _needed_bytes(facts, model, layout, count) <= budget_bytes]
    notes = []
    if not fitting:
        notes.append(
            f"the cost model has no room for a KV cache of {counts[0]} sequences of {facts.workload.max_tokens} tokens "
            f"beside the weights in {share:g} of a device's memory: the share is left free."
        )
    elif fitting[-1] < admitted[-1]:
        notes.append(
            f"of up to {admitted[-1]} sequences at a time, the KV cache in {share:g} of a device's memory has room for "
            f"{fitting[-1]} of the longest, and no more are costed."
        )
    return tuple(_forbid_others(facts, counts, fitting or admitted)), notes


def _layout(facts: Facts, words: Mapping[str, FieldValue]) -> Layout | None:
    """The layout of the engines; None where the configuration does not give one or it is not legal here."""
    pool, tp, pp = (words.get(f"{GENERATE}.{key}") for key in ("pool", "tp", "pp"))
    if pool is None or tp is None or pp is None:
        return None
    try:
        layout = layout_of({"tp": int(tp), "pp": int(pp)}, int(str(pool).partition(":")[2]))
    except BadInput:
        return None
    return None if any(layout_rules(facts, facts.graph.by_name[GENERATE], layout)) else layout


def _needed_bytes(facts: Facts, model: CostModel, layout: Layout, count: int) -> float:
    schedule = Schedule(generation_slots=count)
    stage = facts.graph.by_name[GENERATE]
    call = Call(stage=stage, model=facts.models.actor, layout=layout, schedule=schedule)
    stage_bytes = model.on_layout(call).bytes(schedule)
    return stage_bytes.weights + stage_bytes.transient


def _forbid_others(facts: Facts, counts: tuple[int, ...], admitted: list[int]) -> Iterator[Pin]:
    for count in counts:
        if count not in admitted:
            yield parse_pin(f"{GENERATE}.generation_slots!={count}", facts.graph)
