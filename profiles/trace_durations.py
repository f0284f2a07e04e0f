"""How long things took in one step of a trace, without what a rank waited for another to come.

Ranks that exchange something wait in it for the one that comes last, and their spans are longer by that. What keeps
the last one is another stage, whose own span tells it: counted here too it would be counted twice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from meshwright.profiles.layout import Layout
from meshwright.profiles.stages import Stage
from meshwright.profiles.trace import Span


def stage_seconds(stage: Stage, layout: Layout, spans: Sequence[Span]) -> float:
    """The slowest replica's, from when its last rank begins until its last one ends, in all waves of a step together
    where there are several. Replicas that train together, or share experts, are one. `spans` are the stage's own of one
    step, at least one of the first rank of its pool."""
    first, is_one = min(span.rank for span in spans), stage.trains or layout.expert_replicas > 1
    by_rank: dict[int, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_seconds):
        by_rank[span.rank].append(span)
    replicas: dict[int, list[list[Span]]] = defaultdict(list)
    for rank, of_rank in by_rank.items():
        replicas[0 if is_one else layout.coordinates(rank - first).dp].append(of_rank)
    return max(
        math.fsum(
            max(span.end_seconds for span in wave) - max(span.start_seconds for span in wave)
            for wave in zip(*ranks, strict=False)  # of a trace that was cut short, the waves that all ranks have
        )
        for ranks in replicas.values()
    )


def refit_seconds(spans: Iterable[Span]) -> float:
    """The most that a rank spends in the refits of one step, each of which takes what it takes the rank that comes
    last; 0 without one. Other spans are passed over."""
    refits: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind == "refit":
            refits[span.instruction].append(span)
    by_rank: dict[int, float] = defaultdict(float)
    for ranks in refits.values():
        shortest = min(span.seconds for span in ranks)
        for span in ranks:
            by_rank[span.rank] += shortest
    return max(by_rank.values(), default=0.0)
