"""Durations of stages and refits in one step of a trace, without time spent waiting for other ranks.

Ranks that communicate wait for the last one to arrive, which lengthens their spans. The cause of the delay is an
earlier stage with spans of its own, so that counting the wait here would count it twice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from meshwright.profiles.layout import Layout
from meshwright.profiles.stages import Stage
from meshwright.profiles.trace import Span


def stage_seconds(stage: Stage, layout: Layout, spans: Sequence[Span]) -> float:
    """Return the seconds of the slowest replica, from the start of its last rank to the end of its last rank.

    The waves of a step are summed. Replicas that train together or share experts count as one. `spans` are those of the
    stage in one step, with at least one on the first rank of its pool.
    """
    first, is_one = min(span.rank for span in spans), stage.trains or layout.expert_replicas > 1
    by_rank: dict[int, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_seconds):
        by_rank[span.rank].append(span)
    replicas: dict[int, list[list[Span]]] = defaultdict(list)
    for rank, rank_spans in by_rank.items():
        replicas[0 if is_one else layout.coordinates(rank - first).dp].append(rank_spans)
    return max(
        math.fsum(
            max(span.end_seconds for span in wave) - max(span.start_seconds for span in wave)
            for wave in zip(*ranks, strict=False)  # in an incomplete trace, only the waves that all ranks have
        )
        for ranks in replicas.values()
    )


def refit_seconds(spans: Iterable[Span]) -> float:
    """Return the largest sum over the refits of one step on any rank, 0 without refits; other spans are ignored.

    A refit counts with its shortest span, that of the rank which arrives last and does not wait.
    """
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
