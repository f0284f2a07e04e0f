"""Enumerates the legal layouts and schedules of a stage, and keeps the undominated choices of one site.

A site is a layout on a part of the cluster. The proof is about plans with a short period, that is one of at most a
given length; a choice that takes more time than the other stages leave in such a period is dropped. A dominated choice
can be replaced by the one that dominates it in every plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import le
from typing import NamedTuple, TypeAlias

from meshwright.cost_models.protocol import Bytes, LayoutCosts, Memo
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.layout_and_schedule_rules import layout_rules, max_context_parallel, offered_layouts
from meshwright.profiles.layout import Layout, divisors
from meshwright.profiles.schedule import Offload, Recompute, Schedule
from meshwright.profiles.stages import Stage

_ROUNDING = 1e-9
"""Relative difference that may occur between equal sums of seconds."""


class TimeLowerBounds(NamedTuple):
    """Lower bounds over the choices of a stage: tail seconds, and tail seconds x ranks (`work`)."""

    seconds: float
    work: float


@dataclass(frozen=True)
class Allowance:
    """The maximum time of one stage in a short period: seconds, and ranks x seconds (`work`)."""

    seconds: float
    work: float

    def allows(self, num_ranks: int, seconds: float) -> bool:
        """Return True if a choice on `num_ranks` ranks that takes `seconds` may be in a short period."""
        return seconds <= self.seconds and num_ranks * seconds <= self.work

    def covers(self, other: Allowance) -> bool:
        """Return True if this allowance is at least as large as the other."""
        return other.seconds <= self.seconds and other.work <= self.work


@dataclass(frozen=True)
class ShortPeriod:
    """A period of at most `max_seconds` on `num_ranks` ranks.

    `lags` are the seconds of the transfers within it, by producer and consumer; `names` has producers before consumers.
    """

    max_seconds: float
    num_ranks: int
    names: tuple[str, ...]
    lags: Mapping[tuple[str, str], float]

    def allowance_of(self, stage: str, least: Mapping[str, TimeLowerBounds]) -> Allowance:
        """Return the time that the other stages leave to a stage if each takes its lower bound in `least`.

        Both the longest path through the period and the total ranks x seconds limit it.
        """
        others = {name: stage_least for name, stage_least in least.items() if name != stage}
        edges = [
            (self.names.index(producer), self.names.index(consumer), lag)
            for (producer, consumer), lag in self.lags.items()
        ]
        seconds = [others[name].seconds if name in others else 0.0 for name in self.names]
        position, last = self.names.index(stage), len(self.names) - 1
        before = _longest_paths(seconds, edges)[position]
        after = _longest_paths(
            seconds[::-1], [(last - consumer, last - producer, lag) for producer, consumer, lag in edges]
        )[last - position]
        max_seconds = self.max_seconds * (1 + _ROUNDING)
        return Allowance(
            max_seconds - before - after,
            max_seconds * self.num_ranks - sum(stage_least.work for stage_least in others.values()),
        )


def _longest_paths(seconds: list[float], edges: list[tuple[int, int, float]]) -> list[float]:
    """Return for each stage the length in seconds of the longest path that ends before it."""
    starts = [0.0] * len(seconds)
    for position in range(len(seconds)):
        paths = (
            starts[producer] + seconds[producer] + lag for producer, consumer, lag in edges if consumer == position
        )
        starts[position] = max(paths, default=0.0)
    return starts


class ScheduleFamily(NamedTuple):
    """Schedules that differ only in how much they process at a time, those that may need less memory first.

    Each member is paired with its quickest variant, which recomputes and offloads nothing.
    """

    plain: Schedule
    members: list[tuple[Schedule, Schedule]]


def group_by_family(schedules: Iterable[Schedule]) -> tuple[ScheduleFamily, ...]:
    """Group schedules into families."""
    families: dict[Schedule, ScheduleFamily] = {}
    for schedule in schedules:
        plain = replace(schedule, micro_batch_size=1, micro_batch_tokens=0, generation_slots=0)
        quickest = replace(schedule, recompute=Recompute.NONE, offload=Offload.NONE)
        families.setdefault(plain, ScheduleFamily(plain, [])).members.append((schedule, quickest))
    return tuple(families.values())


def legal_layouts(facts: Facts, stage: Stage, num_ranks: int, part: int) -> Iterator[Layout]:
    """Yield every legal factorisation of `num_ranks` into tp x pp x cp x dp with the other degrees of a layout.

    A rule that the plain layout violates is also violated with virtual pipeline chunks and expert parallelism.
    """
    num_layers, max_cp = facts.models.spec(stage.role).num_layers, max_context_parallel(facts, stage)
    for tp in divisors(num_ranks):
        for pp in divisors(num_ranks // tp):
            for cp in divisors(num_ranks // (tp * pp)):
                if cp > max_cp:
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


Row: TypeAlias = tuple[float, float, float, float, float]
"""Seconds and tail seconds; resident bytes without shareable weights, bytes of these weights, and transient bytes."""


@dataclass(frozen=True, kw_only=True)
class ParetoFront:
    """The Pareto front of one stage on one site: the choices that no other choice beats in seconds and bytes.

    `shares` is True if the stage may share its weights with another. `least` returns a lower bound on the seconds of a
    schedule and of its slower variants, which recompute or offload. `fits` returns True if these bytes fit on the
    device and its host.
    """

    num_ranks: int
    may_share_weights: bool
    max_period_seconds: float
    allowance: Allowance
    costs: LayoutCosts
    least: Callable[[Schedule], float]
    fits: Callable[[Bytes], bool]
    rows: list[Row] = field(default_factory=list)
    _lower_bounds: Memo[Schedule, float] = field(default_factory=Memo)

    def add(self, family: ScheduleFamily) -> None:
        """Add the schedules of a family."""
        for schedule, quickest in family.members:
            lower_bound = self._lower_bounds.memoize(quickest, partial(self.least, quickest))
            if not self.allowance.allows(self.num_ranks, lower_bound):
                continue
            required = self.costs.bytes(schedule)
            if self.fits(required):  # otherwise larger members are still tried: they may need less memory
                self._add_fitting(schedule, required, lower_bound)

    def _add_fitting(self, schedule: Schedule, required: Bytes, lower_bound: float) -> None:
        """Add a schedule that fits; its seconds are computed only if no row dominates its lower bound."""
        weights = required.weights if self.may_share_weights else 0.0
        amounts = required.resident - weights, weights, required.transient
        if self._is_dominated((lower_bound, lower_bound, *amounts)):
            return
        seconds = self.costs.seconds(schedule)
        tail = self.costs.tail_seconds(schedule) if schedule.chunk_tokens else seconds
        row = seconds, tail, *amounts
        is_short = seconds <= self.max_period_seconds and self.allowance.allows(self.num_ranks, tail)
        if is_short and not self._is_dominated(row):
            self.rows.append(row)

    def _is_dominated(self, row: Row) -> bool:
        """Return True if some row is no larger in any amount."""
        return any(all(map(le, other, row)) for other in self.rows)
