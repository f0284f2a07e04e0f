"""What the rules allow a stage: every layout, and schedules by what tells their families apart."""

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
    """Schedules that are the same but for what they take at a time, those that may take less memory first; each with
    the quickest of those that keep less of its activations and state on the device."""

    plain: Schedule
    members: list[tuple[Schedule, Schedule]]


def families_in(every: Iterable[Schedule]) -> tuple[Family, ...]:
    """The families of some schedules."""
    found: dict[Schedule, Family] = {}
    for schedule in every:
        plain = replace(schedule, micro_batch_size=1, micro_batch_tokens=0, generation_slots=0)
        quickest = replace(schedule, recompute=Recompute.NONE, offload=Offload.NONE)
        found.setdefault(plain, Family(plain, [])).members.append((schedule, quickest))
    return tuple(found.values())


def legal_layouts(facts: Facts, stage: Stage, num_ranks: int, part: int) -> Iterator[Layout]:
    """Every legal way to write a number of ranks as tp x pp x cp x dp, with what else a layout has. What a plain one
    breaks, the same with chunks and experts dealt out breaks too."""
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
                            found = replace(layout, vpp=vpp)
                            if not layout_rules(facts, stage, found, part):
                                yield found
