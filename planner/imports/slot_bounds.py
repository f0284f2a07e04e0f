"""How many sequences an engine decodes at a time, at most: what its configuration admits, and what its cache holds.

A trainer gives its engine an upper limit of sequences (`max_num_seqs`) and a share of the memory for weights and cache
(`gpu_memory_utilization`). Neither is a number of slots: what runs is what fits, up to the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshwright.cost_models.question import Call, CostModel
from meshwright.planner.imports.said import MEMORY_SHARE, Word, layout_of
from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.pins import Pin, parse_pin
from meshwright.planner.plan.rules import layout_rules, slot_counts
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import GENERATE


def slot_bounds(facts: Facts, model: CostModel, words: Mapping[str, Word]) -> tuple[tuple[Pin, ...], list[str]]:
    """Pins against the numbers of slots that a configuration does not admit, and sentences on them.

    A number is admitted up to the configuration's limit where weights, cache and working set take no more than the
    share of a device; the smallest always is.
    """
    layout = _layout(facts, words)
    if layout is None:
        return (), []
    counts = slot_counts(-(-facts.workload.batch_size // layout.dp), layout.pp)
    limit, share = int(words.get(f"{GENERATE}.generation_slots", counts[-1])), words.get(MEMORY_SHARE)
    admitted = [count for count in counts if count <= limit] or [counts[0]]
    if share is None:
        return tuple(_without(facts, counts, admitted)), []
    room = float(share) * facts.cluster.parts[0].device.memory_bytes
    held = [count for count in admitted if _needed_bytes(facts, model, layout, count) <= room]
    notes = []
    if not held:
        notes.append(
            f"the cost model has no room for a KV cache of {counts[0]} sequences of {facts.workload.max_tokens} tokens "
            f"beside the weights in {share:g} of a device's memory: the share is left free."
        )
    elif held[-1] < admitted[-1]:
        notes.append(
            f"of up to {admitted[-1]} sequences at a time, the KV cache in {share:g} of a device's memory has room for "
            f"{held[-1]} of the longest, and no more are costed."
        )
    return tuple(_without(facts, counts, held or admitted)), notes


def _layout(facts: Facts, words: Mapping[str, Word]) -> Layout | None:
    """Gives the layout of the engines; None where the configuration does not say it or it is not legal here."""
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
    found = model.on_layout(call).bytes(schedule)
    return found.weights + found.transient


def _without(facts: Facts, counts: tuple[int, ...], admitted: list[int]) -> Iterator[Pin]:
    for count in counts:
        if count not in admitted:
            yield parse_pin(f"{GENERATE}.generation_slots!={count}", facts.graph)
