"""Enumerates what the rules allow a stage: every layout, and its schedules grouped by family."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from meshwright.planner.plan.job import Facts
from meshwright.planner.plan.rules import layout_rules, max_context_parallel, offered_layouts
from meshwright.profiles.layout import Layout, divisors
from meshwright.profiles.schedule import Offload, Recompute, Schedule
from meshwright.profiles.stages import Stage


class Family(NamedTuple):
    """Schedules that differ only in how much they process at a time, those that may need less memory first.

    Each member is paired with its quickest variant, which recomputes and offloads nothing.
    """

    plain: Schedule
    members: list[tuple[Schedule, Schedule]]


def families_in(schedules: Iterable[Schedule]) -> tuple[Family, ...]:
    """Group schedules into families."""
    families: dict[Schedule, Family] = {}
    for schedule in schedules:
        plain = replace(schedule, micro_batch_size=1, micro_batch_tokens=0, generation_slots=0)
        quickest = replace(schedule, recompute=Recompute.NONE, offload=Offload.NONE)
        families.setdefault(plain, Family(plain, [])).members.append((schedule, quickest))
    return tuple(families.values())


def legal_layouts(facts: Facts, stage: Stage, num_ranks: int, part: int) -> Iterator[Layout]:
    """Yield every legal factorisation of `num_ranks` into tp x pp x cp x dp with the other degrees of a layout.

    A rule that the plain layout violates is also violated with chunks and expert parallelism.
    """
    num_layers, most_cp = facts.models.spec(stage.role).num_layers, max_context_parallel(facts, stage)
    for tp in divisors(num_ranks):
        for pp in divisors(num_ranks // tp):
            for cp in divisors(num_ranks // (tp * pp)):
                if cp > most_cp:
                    break
                dp = num_ranks // (tp * pp * cp)
                for sp in (False, True) if tp > 1 else (False,):
                    plain = Layout(tp=tp, pp=pp, dp=dp, sp=sp, cp=cp)
                    if layout_rules(facts, stage, plain, part):
                        continue
                    for layout in offered_layouts(facts, stage, plain):
                        chunks = (
                            divisors(num_layers // pp) if stage.trains and num_layers % pp == 0 and pp > 1 else (1,)
                        )
                        for vpp in chunks:
                            chunked = replace(layout, vpp=vpp)
                            if not layout_rules(facts, stage, chunked, part):
                                yield chunked
